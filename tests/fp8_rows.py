"""Cache rows with FP8 latents, made and read by torch's own conversions: see csrc/attention.h."""

import torch
from torch import Tensor

from kdtree.cache import fp8_row_bytes

E4M3 = torch.float8_e4m3fn
POISON = 0xFF  # of all bytes that are not written: NaN as a code, a scale and a bfloat16


def quantised(x: Tensor, C: int) -> Tensor:
    """x: [..., C + R]; returns uint8 [..., bytes]. A row that holds a NaN is poison altogether."""
    latent, rope = x.double().split([C, x.shape[-1] - C], -1)
    scale = (latent.abs().amax(-1, keepdim=True) / 448).float()
    scale[scale == 0] = 1
    rows = torch.full((*x.shape[:-1], fp8_row_bytes(C, rope.shape[-1])), POISON, dtype=torch.uint8)
    rows[..., :C] = (latent / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
    rows[..., C : C + 4] = scale.view(torch.uint8)
    end = C + 16 + 2 * rope.shape[-1]
    rows[..., C + 16 : end] = rope.bfloat16().contiguous().view(torch.uint8)
    rows[x.isnan().any(-1)] = POISON
    return rows


def parts(rows: Tensor, C: int, R: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [..., C] e4m3, scale [..., 1] float32, rope part [..., R] bfloat16, on the CPU."""
    rows = rows.cpu()
    codes, scale, rope = rows[..., :C], rows[..., C : C + 4], rows[..., C + 16 : C + 16 + 2 * R]
    codes, scale, rope = (x.contiguous() for x in (codes, scale, rope))
    return codes.view(E4M3), scale.view(torch.float32), rope.view(torch.bfloat16)


def widened(rows: Tensor, C: int, R: int) -> Tensor:
    """[..., C + R] float64, exact."""
    codes, scale, rope = parts(rows, C, R)
    return torch.cat([codes.double() * scale.double(), rope.double()], -1)
