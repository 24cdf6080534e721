"""INT4 weights for the tests, as compressed-tensors stores them, and their values."""

import numpy as np
import torch
from torch import Tensor


def random_int4(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator):
    """Codes [..., O, I] in 0 .. 15, every one of them present, and scales [..., O, I / 32].

    A group's scale is 1 to 128 times another's, so that one that is misplaced shows.
    """
    codes = torch.randint(16, shape, generator=rng, dtype=torch.uint8)
    codes.view(-1)[:16] = torch.arange(16)
    groups = (*shape[:-1], shape[-1] // 32)
    size = torch.randint(-9, -2, groups, generator=rng)
    scale = (1 + torch.rand(groups, generator=rng)) * 2.0**size
    return codes.numpy(), scale.to(dtype)


def words(codes: np.ndarray) -> Tensor:
    """The int32 words [..., O, I / 8] of codes, low nibble first."""
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.from_numpy(np.ascontiguousarray(pairs).view("<i4").copy())


def values(codes: np.ndarray, scale: Tensor) -> np.ndarray:
    """The float64 weights [..., O, I]."""
    return (codes.astype(np.float64) - 8) * scale.double().numpy().repeat(32, axis=-1)
