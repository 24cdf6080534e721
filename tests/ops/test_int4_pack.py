import numpy as np
import pytest
import torch
from int4 import random_int4, words
from torch.library import opcheck

from kdtree import ops


def unpack(packed: torch.Tensor) -> np.ndarray:
    """Codes [O, I] as mma.m16n8k16 sees them: register r of lane (g, t) of the 16 x 16 block (m, k)
    holds row g + 8 (r % 2) and the columns 2 t + 8 (r / 2) and the one after, the first in its low
    half (PTX ISA, matrix fragments for mma.m16n8k16)."""
    tile_rows, tiles, _ = packed.shape
    bits = packed.cpu().numpy().view(np.uint32)
    codes = np.full((tile_rows, 32, tiles, 32), 255, np.uint8)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for m in range(2):
            for k in range(2):
                for r in range(4):
                    register = bits[:, :, 4 * lane + 2 * m + k] >> 4 * r & 0x000F000F
                    row, column = 16 * m + g + 8 * (r % 2), 16 * k + 2 * t + 8 * (r // 2)
                    codes[:, row, :, column] = register & 0xFFFF
                    codes[:, row, :, column + 1] = register >> 16
    return codes.reshape(tile_rows * 32, tiles * 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("O, I", [(32, 32), (96, 160), (160, 96)])
def test_layout(O, I, dtype, device, rng):
    codes, scale = random_int4((O, I), dtype, rng)
    packed, packed_scale = ops.int4_pack(words(codes).to(device), scale.to(device))
    assert packed.shape == (O // 32, I // 32, 128) and packed_scale.dtype == dtype
    np.testing.assert_array_equal(unpack(packed), codes)
    want = scale.view(O // 32, 32, I // 32).transpose(1, 2)
    assert torch.equal(packed_scale.cpu(), want)


def test_bank_is_its_experts(device, rng):
    codes, scale = random_int4((3, 64, 96), torch.bfloat16, rng)
    bank = words(codes).to(device)
    packed, packed_scale = ops.int4_pack(bank, scale.to(device))
    assert packed.shape == (3, 2, 3, 128) and packed_scale.shape == (3, 2, 3, 32)
    for e in range(3):
        one, one_scale = ops.int4_pack(bank[e], scale[e].to(device))
        assert torch.equal(packed[e], one) and torch.equal(packed_scale[e], one_scale)


@pytest.mark.parametrize("shape", [(0, 4), (2, 32, 0), (0, 32, 4)])
def test_nothing_to_pack(shape, device):
    codes = torch.zeros(shape, dtype=torch.int32, device=device)
    scale = torch.zeros((*shape[:-1], shape[-1] // 4), device=device)
    packed, packed_scale = ops.int4_pack(codes, scale)
    assert packed.numel() == 0 and packed.shape[:-1] == packed_scale.shape[:-1]


def test_registration(device, rng):
    codes, scale = random_int4((2, 32, 64), torch.float32, rng)
    opcheck(torch.ops.kdtree.int4_pack, (words(codes).to(device), scale.to(device)))


def test_rejects_bad_arguments(device):
    codes = torch.zeros(64, 8, dtype=torch.int32, device=device)
    scale = torch.zeros(64, 2, device=device)
    with pytest.raises(RuntimeError, match="O is 40, wants a multiple of 32"):
        ops.int4_pack(codes[:40], scale[:40])
    with pytest.raises(RuntimeError, match="I is 40, wants a multiple of 32"):
        ops.int4_pack(codes[:, :5].contiguous(), scale)
    with pytest.raises(RuntimeError, match=r"scale has shape \[64, 1\], wants \[64, 2\]"):
        ops.int4_pack(codes, scale[:, :1].contiguous())
    with pytest.raises(RuntimeError, match="codes has dtype Long, wants Int"):
        ops.int4_pack(codes.long(), scale)
    with pytest.raises(RuntimeError, match="scale has dtype Half, wants Float or BFloat16"):
        ops.int4_pack(codes, scale.half())
    with pytest.raises(RuntimeError, match=r"codes has shape \[8\], wants 2 or 3 dimensions"):
        ops.int4_pack(codes[0], scale)
    with pytest.raises(RuntimeError, match="codes must be contiguous"):
        ops.int4_pack(codes[:, ::2], scale[:, :1])
