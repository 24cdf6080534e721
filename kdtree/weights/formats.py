"""Number formats of stored matrices: plain, FP8 in blocks, and INT4 in groups."""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # input features that share an INT4 scale
BLOCK = 128  # output and input features that share an FP8 scale
STRIPE = 16  # rows of blocks converted at a time: bounds the float32 copies
STEPS = 7.5  # an INT4 group's largest magnitude, in steps: the middle of the codes' range, -8 .. 7
CODES = 8  # INT4 codes in a stored word
ZEROS = -0x77777778  # a word of codes that all are 0: 0x88888888, as they are stored with 8 added
FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """One of the tensors that a matrix is stored as.

    suffix: of its name, after the matrix's own, "X.weight"; dtypes: any of them
    factor: the largest that its numbers are multiplied with when the matrix is made from them
    positive: whether they must be; content: what they must be, where that is known
    """

    suffix: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    factor: int = 1
    positive: bool = False
    content: list[int] | None = None


def fp8(shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """A matrix [O, I] and its scales; the last block of a side may be partial."""
    blocks = tuple(-(-side // BLOCK) for side in shape)
    return (
        Stored("", shape, (FP8,)),
        Stored("_scale_inv", blocks, (torch.float32,), int(torch.finfo(FP8).max), positive=True),
    )


def int4(shape: tuple[int, ...]) -> tuple[Stored, ...]:
    """Codes, scales and shape of a matrix [O, I] as compressed-tensors stores it."""
    out, features = shape
    return (
        Stored("_packed", (out, features // CODES), (torch.int32,)),
        Stored("_scale", (out, features // GROUP), factor=8),
        Stored("_shape", (2,), (torch.int32, torch.int64), content=[out, features]),
    )


def dequantize_fp8(w: Tensor, scale: Tensor, out: Tensor) -> Tensor:
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


def loses_codes(codes: Tensor, scale: Tensor) -> bool:
    """Whether some group of stored codes that are not 0 has a scale of 0.

    codes: [O, I / 8] int32; scale: [O, I / 32]
    """
    zero = scale == 0
    if not zero.any():
        return False
    groups = codes.unflatten(1, (-1, GROUP // CODES))
    return bool((zero[..., None] & (groups != ZEROS)).any())


def quantize_int4(w: Tensor) -> tuple[Tensor, Tensor]:
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
    words = code.flatten(1).unflatten(1, (-1, CODES))
    packed = words[..., 0]
    for j in range(1, CODES):
        packed = packed | words[..., j] << 4 * j
    return packed, scale
