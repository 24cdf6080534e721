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
    best: log-probabilities and ids [B, J, k] after each node of the path, where some request asks
    """

    tree: TokenTree
    path: Path
    record: Tensor
    best: tuple[Tensor, Tensor] | None

    def emitted(self) -> list[Emitted]:
        """By sequence. Here the host waits for the device."""
        J = self.path.token.shape[1]
        offered, accepted = self.tree.depth.amax(1), self.path.length - 1
        record = torch.cat([torch.stack([offered, accepted], 1), self.record], 1)
        depths, kept, reason, tokens, bits = to_host(record).split([2, 1, 1, J, J], 1)
        logprobs = bits.int().view(torch.float32)
        best = [to_host(t).tolist() for t in self.best] if self.best else None
        return [
            Emitted(
                token_ids=tokens[b, :n].tolist(),
                logprobs=logprobs[b, :n].tolist(),
                reason=int(reason[b]),
                offered=int(depths[b, 0]),
                accepted=int(depths[b, 1]),
                best=[list(zip(best[1][b][i], best[0][b][i], strict=True)) for i in range(n)]
                if best
                else None,
            )
            for b, n in enumerate(kept[:, 0].tolist())
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


def to_host(x: Tensor) -> Tensor:
    """A copy on the CPU, through pinned memory from CUDA."""
    if x.device.type != "cuda":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host
