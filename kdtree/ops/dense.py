"""Norms and dense products."""

import torch
from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2, -1) + eps) * w, computed in float32.

    x: [T, D], rows contiguous; float32 or bfloat16
    w: [D], dtype of x
    returns [T, D], contiguous, dtype of x
    """
    return ops.rms_norm.default(x, w, eps)


@register_fake("kdtree::rms_norm")
def _(x, w, eps):
    return x.new_empty(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm: sum = x + residual, y = rms_norm(sum, w).

    x, residual: [T, D], contiguous; float32 or bfloat16
    w: [D], dtype of x
    returns y and sum, each [T, D], dtype of x; y is computed from the rounded sum
    """
    return ops.add_rms_norm.default(x, residual, w, eps)


@register_fake("kdtree::add_rms_norm")
def _(x, residual, w, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def linear(x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """x · wᵀ, row-invariant, accumulated in float32; one product, or one per group.

    x: [T, I], rows contiguous, or [T, G, I], features contiguous; float32 or bfloat16
    w: [O, I], or [G, O, I]; contiguous; float32 or bfloat16, whatever x is
    out_dtype: dtype of x (the default) or float32
    returns [T, O] or [T, G, O], contiguous
    """
    return ops.linear.default(x, w, out_dtype)


@register_fake("kdtree::linear")
def _(x, w, out_dtype):
    return x.new_empty((*x.shape[:-1], w.shape[-2]), dtype=out_dtype or x.dtype)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, computed in float32 and rounded once.

    x: [T, 2F], gate then up, contiguous; float32 or bfloat16
    returns [T, F], dtype of x
    """
    return ops.swiglu.default(x)


@register_fake("kdtree::swiglu")
def _(x):
    return x.new_empty((x.shape[0], x.shape[1] // 2))
