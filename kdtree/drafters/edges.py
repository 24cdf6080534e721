"""Edges: what the token before says of a candidate, beside what its own depth says.

A block drafter's distributions know nothing of the branch. An edge e(a, b) is added to the
log-probability of candidate b where it follows candidate a; whatever it is, the candidates of a
depth keep their mass: see scores.py.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdtree import ops
from kdtree.errors import CapacityError, CheckpointError
from kdtree.state import State

LARGEST_TABLE = 1 << 14  # tokens of a vocabulary that a table is for: 512 MiB


class Selector:
    """A low-rank edge that was trained: <A[a] * (P h), B[b]>, as DFlash2's path selector has it.

    projection: [r, D], P; predecessor, successor: [V, r], A and B; float32 or bfloat16
    Source: z-lab/dflash, dflash/model.py
    """

    def __init__(self, projection: Tensor, predecessor: Tensor, successor: Tensor):
        self.projection = projection
        self.predecessor, self.successor = predecessor, successor

    def direction(self, hidden: Tensor) -> Tensor:
        """P h, [B, J, r] float32. hidden: [B, J, D], the drafter's normed last hidden"""
        direction = ops.linear(hidden.flatten(0, 1), self.projection, torch.float32)
        return direction.unflatten(0, hidden.shape[:2])


class Bigram:
    """What a corpus says of two tokens: log P(b|a), less the log of its mean over the a before.

    The mean is what a marginal knows of b already, so that only the branch's own share is added;
    after the root, where there is one token before, nothing is.
    logprob: [V, V], log P(column | row), finite; a floating-point dtype
    """

    def __init__(self, logprob: Tensor):
        self.logprob = logprob

    @staticmethod
    def load(path: str | Path, vocab: int, device: torch.device) -> "Bigram":
        """From the tensor `logprob` [vocab, vocab] of a safetensors file.

        Raises CapacityError where the vocabulary is too large for a table, CheckpointError where
        the file or the tensor is not as wanted.
        """
        if vocab > LARGEST_TABLE:
            raise CapacityError(
                f"a bigram table of {vocab} tokens takes {2 * vocab**2 / 2**30:.1f} GiB,"
                f" at most {LARGEST_TABLE} tokens are supported"
            )
        if not isinstance(path, str | Path):
            raise TypeError(f"bigram is {path!r}, wants a safetensors file")
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if names != ["logprob"]:
                    raise CheckpointError(f"{path} holds {names}, wants the one tensor 'logprob'")
                shape = file.get_slice("logprob").get_shape()
                if shape != [vocab, vocab]:
                    raise CheckpointError(
                        f"{path}: logprob has shape {shape}, wants {[vocab, vocab]}"
                    )
                logprob = file.get_tensor("logprob")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is no bigram table: {error}") from None
        if logprob.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise CheckpointError(
                f"{path}: logprob has dtype {logprob.dtype}, wants float32, float16 or bfloat16"
            )
        if not logprob.isfinite().all():
            raise CheckpointError(f"{path}: logprob is not finite")
        return Bigram(logprob.to(device))

    def __call__(self, logits: Tensor, candidate: Tensor, state: State) -> Tensor:
        """The edges [B, J, M, M] float32 from each candidate of a depth to each of the next.

        logits: [B, J, V] float32; candidate: [B, J, M] int64; the root stands before all of depth 1
        """
        root = state.root()[:, None, None].expand_as(candidate[:, :1])
        before = torch.cat([root, candidate[:, :-1]], 1)
        belief = logits.gather(2, candidate)[:, :-1]
        belief = torch.cat([torch.zeros_like(belief[:, :1]), belief], 1).log_softmax(2)
        pair = self.logprob[before[..., None], candidate[:, :, None]].float()
        return pair - (belief[..., None] + pair).logsumexp(2, keepdim=True)
