"""INT4, in groups of 32 that share a scale: in training, and as a checkpoint holds it."""

import torch
from torch import Tensor

GROUP = 32  # weights that share an INT4 scale


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 codes [..., groups, 32] and scales [..., groups, 1], chosen by squared error."""
    w = w.float().unflatten(-1, (-1, GROUP))
    largest = w.abs().amax(-1, keepdim=True).clamp(min=1e-8)
    best = scale = code = None
    for steps in (6.2, 6.6, 7.0, 7.4, 7.8, 8.2, 8.7, 9.3, 10.0):
        s = (largest / steps).bfloat16().float()
        q = (w / s).round().clamp(-8, 7)
        error = (q * s - w).square().sum(-1, keepdim=True)
        if best is None:
            best, scale, code = error, s, q
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, s, scale)
        code = torch.where(better, q, code)
    return code, scale


def dequantize(code: Tensor, scale: Tensor) -> Tensor:
    return (code * scale).flatten(-2)


def packed(code: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """codes [out, groups, 32] and scales [out, groups, 1] as a checkpoint holds them."""
    shape = torch.tensor([code.shape[0], code[0].numel()], dtype=torch.int32)
    nibbles = (code.to(torch.int64) + 8).flatten(1).unflatten(1, (-1, 8))
    word = (nibbles << (4 * torch.arange(8))).sum(-1)
    word = torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
    return dict(weight_packed=word, weight_scale=scale[..., 0].bfloat16(), weight_shape=shape)
