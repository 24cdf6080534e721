"""A dense product."""

import torch
from torch import Tensor, nn

from kdtree import ops


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
