"""A round's outcome on its way to the host: one copy, read sequence by sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree.outputs import RoundTrace
from kdtree.request import Emitted
from kdtree.tree import Path, TokenTree


@dataclass(frozen=True, slots=True)
class Round:
    """What a round left on the device.

    record: [B, 2 + 2 J] int64, from State.commit
    best: log-probabilities and ids [B * N, k] of every node, where some request asks for them
    """

    tree: TokenTree
    path: Path
    record: Tensor
    best: tuple[Tensor, Tensor] | None

    def emitted(self) -> list[Emitted]:
        """By sequence. The one place where the host waits for the device."""
        J = self.path.token.shape[1]
        kept, reason, tokens, bits = self.record.cpu().split([1, 1, J, J], 1)
        logprobs = bits.int().view(torch.float32)
        best = self._best() if self.best else None
        return [
            Emitted(
                token_ids=tokens[b, :n].tolist(),
                logprobs=logprobs[b, :n].tolist(),
                reason=int(reason[b]),
                best=best[b][:n] if best else None,
            )
            for b, n in enumerate(kept[:, 0].tolist())
        ]

    def _best(self) -> list[list[dict[int, float]]]:
        """The best tokens at every node of every path."""
        B, J = self.path.node.shape
        index = self.path.node.clamp(min=0).long()[..., None]
        logprob, token = (
            t.view(B, -1, t.shape[1]).gather(1, index.expand(-1, -1, t.shape[1])).tolist()
            for t in self.best
        )
        return [
            [dict(zip(token[b][j], logprob[b][j], strict=True)) for j in range(J)] for b in range(B)
        ]

    def trace(self, b: int, emitted: Emitted) -> RoundTrace:
        """The tree of sequence b and what was kept of it, for drawing."""
        return RoundTrace(
            token=self.tree.token[b].tolist(),
            parent=self.tree.parent[b].tolist(),
            score=self.tree.score[b].tolist(),
            path=self.path.node[b, : len(emitted.token_ids)].tolist(),
            emitted=emitted.token_ids,
        )
