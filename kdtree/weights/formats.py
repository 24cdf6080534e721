"""Number formats of stored matrices: FP8 in blocks, and INT4 in groups."""

import torch
from torch import Tensor

GROUP = 32  # input features that share an INT4 scale
BLOCK = 128  # output and input features that share an FP8 scale
STRIPE = 16  # rows of blocks converted at a time: bounds the float32 copies
STEPS = 7.5  # an INT4 group's largest magnitude, in steps: the middle of the codes' range, -8 .. 7


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a matrix of this shape, [O, I]; the last block of a side may be partial."""
    return tuple(-(-side // BLOCK) for side in shape)


def dequantise_fp8(w: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Each weight times its block's scale: one product in float32, rounded to the dtype of out.

    w: [O, I] float8_e4m3fn; scale: [ceil(O / 128), ceil(I / 128)] float32
    out: [O, I], written and returned
    Source: weight_dequant of DeepSeek-V3's inference code.
    """
    parts = (part.split(STRIPE * BLOCK) for part in (out, w))
    for part, stored, scales in zip(*parts, scale.split(STRIPE), strict=True):
        scales = scales.repeat_interleave(BLOCK, 0)[: len(part)]
        scales = scales.repeat_interleave(BLOCK, 1)[:, : w.shape[1]]
        part.copy_(scales.mul_(stored.float()))
    return out


def quantise_int4(w: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric INT4 in groups of 32, by the min-max rule of compressed-tensors.

    A group's scale is its largest magnitude / 7.5, rounded to bfloat16; a code is w / scale,
    rounded half to even and clipped to -8 .. 7. A group of zeros has scale 2^-7.
    w: [O, I], float32 or bfloat16, I a multiple of 32
    returns codes [O, I / 8] int32 as a checkpoint packs them, and scale [O, I / 32] bfloat16
    """
    groups = w.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / STEPS).bfloat16()
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    code = (groups / scale.float()[..., None]).round().clamp(-8, 7).int() + 8
    words = code.flatten(1).unflatten(1, (-1, 8))
    packed = words[..., 0]
    for j in range(1, 8):
        packed = packed | words[..., j] << 4 * j
    return packed, scale
