"""Dense products, their weights plain or INT4."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.weights import Weights
from kdtree.weights.formats import GROUP


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is never trained."""
    return nn.Parameter(tensor, requires_grad=False)


class Linear(nn.Module):
    """x · weightᵀ; weight: [O, I], or [G, O, I] for one product a group."""

    def __init__(self, weight: Tensor, out_dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = frozen(weight)
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.out_dtype)

    def rows(self, begin: int, end: int) -> "Linear":
        """The product with some of the weight's rows, the same memory. weight: [O, I]"""
        return Linear(self.weight[begin:end], self.out_dtype)


class Int4Linear(nn.Module):
    """x · weightᵀ with INT4 weights, as ops.int4_linear takes them."""

    def __init__(self, packed: Tensor, scale: Tensor):
        super().__init__()
        self.packed, self.scale = frozen(packed), frozen(scale)

    def forward(self, x: Tensor) -> Tensor:
        return ops.int4_linear(x, self.packed, self.scale)

    def rows(self, begin: int, end: int) -> "Int4Linear":
        """The product with some of the weight's rows, whole tiles, the same memory."""
        tiles = slice(begin // GROUP, end // GROUP)
        return Int4Linear(self.packed[tiles], self.scale[tiles])


def joined(a: Linear | Int4Linear, b: Linear | Int4Linear) -> Linear | Int4Linear:
    """One product for two of the same input: a's outputs, then b's."""
    if isinstance(a, Int4Linear):
        return Int4Linear(torch.cat([a.packed, b.packed]), torch.cat([a.scale, b.scale]))
    return Linear(torch.cat([a.weight, b.weight]), a.out_dtype)


def stored_linear(w: Weights, names: Sequence[str], out: int, features: int) -> Linear | Int4Linear:
    """The product with matrices [out, features] one below the other.

    All are INT4 where the first is stored so.
    """
    if w.has(f"{names[0]}.weight_packed"):
        return Int4Linear(*(bank.flatten(0, 1) for bank in w.take_int4_bank(names, out, features)))
    matrices = [w.take_matrix(f"{name}.weight", out, features) for name in names]
    return Linear(matrices[0] if len(matrices) == 1 else torch.cat(matrices))
