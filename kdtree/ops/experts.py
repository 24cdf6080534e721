"""INT4 products, routing and routed experts."""

import torch
from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def int4_pack(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Repacks compressed-tensors INT4 (symmetric, group 32) into the tiles of csrc/kdtree.h.

    codes: [..., O, I / 8] int32, low nibble first, code = value + 8; O and I multiples of 32
    scale: [..., O, I / 32], float32 or bfloat16
    returns packed [..., O / 32, I / 32, 128] int32 and scale [..., O / 32, I / 32, 32], with at
    most one leading dimension
    """
    return ops.int4_pack.default(codes, scale)


@register_fake("kdtree::int4_pack")
def _(codes, scale):
    *lead, O, words = codes.shape
    shape = (*lead, O // 32, words // 4)
    return codes.new_empty((*shape, 128)), scale.new_empty((*shape, 32))


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """x · wᵀ with INT4 weights, row-invariant, accumulated in float32.

    x: [T, I], rows contiguous; float32 or bfloat16
    packed: [O / 32, I / 32, 128] int32 and scale: [O / 32, I / 32, 32], dtype of x, from int4_pack
    returns [T, O], dtype of x
    """
    return ops.int4_linear.default(x, packed, scale)


@register_fake("kdtree::int4_linear")
def _(x, packed, scale):
    return x.new_empty((x.shape[0], packed.shape[0] * 32))


def moe_route(
    logits: Tensor,
    bias: Tensor | None,
    position: Tensor | None,
    *,
    experts_per_token: int,
    groups: int = 1,
    kept_groups: int = 1,
    scoring: str = "sigmoid",
    group_score: str = "sum2",
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Chooses each row's experts: scores, bias for the choice only, groups, the K best, weights.

    logits: [T, E] float32
    bias: [E] float32, added to the scores for the choice only, or None
    position: [T] int32, negative at padded rows, or None where no row is padded
    scoring: "sigmoid" or "softmax"; group_score: "sum2" (the two best of a group) or "max"
    normalize: divide the weights by their sum + 1e-20; scale multiplies them after
    returns ids [T, K] int32, best first, ties to the lower id, -1 at padded rows, and weights
    [T, K] float32
    """
    return ops.moe_route.default(
        logits, bias, position, experts_per_token, groups, kept_groups, scoring, group_score,
        normalize, scale,
    )  # fmt: skip


@register_fake("kdtree::moe_route")
def _(logits, bias, position, K, groups, kept_groups, scoring, group_score, normalize, scale):
    shape = (logits.shape[0], K)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """The routed experts' weighted sum: sum_k weights[k] * down(silu(gate x) * up x), + shared.

    x: [T, D], rows contiguous; float32 or bfloat16
    ids: [T, K] int32, negative for none, duplicates legal; weights: [T, K] float32
    gate_up: [E, 2F, D], gate first, and down: [E, D, F], dtype of x; or both INT4 from int4_pack,
    [E, 2F / 32, D / 32, 128] and [E, D / 32, F / 32, 128], with their scales of x's dtype
    shared: [T, D], dtype of x, contiguous, added before the one rounding, or None
    returns [T, D], dtype of x; the sum runs over k in order, in float32
    """
    return ops.moe_experts.default(
        x, ids, weights, gate_up, down, gate_up_scale, down_scale, shared
    )


@register_fake("kdtree::moe_experts")
def _(x, ids, weights, gate_up, down, gate_up_scale, down_scale, shared):
    return x.new_empty(x.shape)
