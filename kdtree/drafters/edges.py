"""Edges: what the token before says of a candidate, beside what its own depth says.

A block drafter's distributions know nothing of the branch. An edge e(a, b) is added to the
log-probability of candidate b where it follows candidate a; whatever it is, the candidates of a
depth keep their mass: see scores.py.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdtree import ops
from kdtree.errors import CapacityError, CheckpointError

LARGEST_TABLE = 1 << 14  # tokens of a vocabulary that a table is for: 512 MiB


class Edges(Protocol):
    def __call__(self, hidden: Tensor, before: Tensor, candidate: Tensor, belief: Tensor) -> Tensor:
        """The edges [B, J, M, M] float32 from before[m] to candidate[m'], of each depth.

        hidden: [B, J, D], the drafter's normed last hidden; before, candidate: [B, J, M] int64
        belief: [B, J, M] float32, log of how likely each token before is; a depth's sum to 1
        """


class Selector:
    """A low-rank edge that was trained: <A[a] * (P h), B[b]>, as DFlash2's path selector has it.

    projection: [r, D], P; predecessor, successor: [V, r], A and B; float32 or bfloat16
    Source: z-lab/dflash, dflash/model.py
    """

    def __init__(self, projection: Tensor, predecessor: Tensor, successor: Tensor):
        self.projection = projection
        self.predecessor, self.successor = predecessor, successor

    def __call__(self, hidden: Tensor, before: Tensor, candidate: Tensor, belief: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1).contiguous()
        direction = ops.linear(rows, self.projection, torch.float32)
        direction = direction.unflatten(0, hidden.shape[:2])[:, :, None]
        start = self.predecessor[before].float() * direction
        return start @ self.successor[candidate].float().mT


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

    def __call__(self, hidden: Tensor, before: Tensor, candidate: Tensor, belief: Tensor) -> Tensor:
        pair = self.logprob[before[..., None], candidate[:, :, None]].float()
        return pair - (belief[..., None] + pair).logsumexp(2, keepdim=True)
