import numpy as np
import pytest
import torch
from int4 import random_int4, values, words
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

SHAPES = [(1, 32, 32), (3, 96, 160), (9, 160, 96), (2, 32, 0), (20, 64, 1120), (70, 32, 2272)]
KIMI = [(1, 256, 7168), (17, 512, 2048)]  # a product's inputs; its outputs are cut


def rows(T, I, dtype, rng, apart=3):
    """Rows that stand apart, with poison between them."""
    x = torch.full((T, I + apart), torch.nan)
    x[:, :I] = torch.randn(T, I, generator=rng)
    return x.to(dtype)


def case(T, O, I, dtype, device, rng, apart=3):
    x = rows(T, I, dtype, rng, apart)
    codes, scale = random_int4((O, max(I, 32)), dtype, rng)
    codes, scale = codes[:, :I], scale[:, : I // 32].contiguous()
    packed = ops.int4_pack(words(codes).view(O, I // 8).to(device), scale.to(device))
    return x.to(device)[:, :I], *packed, values(codes, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("apart", [3, 8])
@pytest.mark.parametrize(
    "T, O, I", SHAPES + [pytest.param(*s, marks=pytest.mark.large) for s in KIMI]
)
def test_matches_float64(T, O, I, apart, dtype, device, rng):
    x, packed, scale, w = case(T, O, I, dtype, device, rng, apart)
    x64 = x.double().cpu().numpy()
    y = ops.int4_linear(x, packed, scale)
    assert y.dtype == dtype
    assert_close("int4_linear", y, x64 @ w.T, np.abs(x64) @ np.abs(w).T)


def test_every_code_times_every_input(device, rng):
    """One-hot rows read the weights back: exact, since a scale of 2^n rounds nothing."""
    O, I = 96, 160
    codes, scale = random_int4((O, I), torch.float32, rng)
    scale = 2.0 ** scale.log2().floor()
    packed = ops.int4_pack(words(codes).to(device), scale.to(device))
    y = ops.int4_linear(torch.eye(I, device=device), *packed)
    assert set(codes.ravel()) == set(range(16))
    np.testing.assert_array_equal(y.cpu().double().numpy(), values(codes, scale).T)


def test_exact_in_integers(device, rng):
    """Sums of integers below 2^24 have no rounding, however far the scales are apart."""
    O, I = 64, 192
    codes, _ = random_int4((O, I), torch.float32, rng)
    scale = 2.0 ** torch.randint(0, 12, (O, I // 32), generator=rng)
    x = torch.randint(-1, 2, (5, I), generator=rng).float()
    packed = ops.int4_pack(words(codes).to(device), scale.to(device))
    y = ops.int4_linear(x.to(device), *packed)
    want = x.double().numpy() @ values(codes, scale).T
    np.testing.assert_array_equal(y.cpu().double().numpy(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_invariance(dtype, device, rng):
    x, packed, scale, _ = case(1024, 64, 352, dtype, device, rng)
    want = ops.int4_linear(x, packed, scale)
    assert torch.equal(ops.int4_linear(x, packed, scale), want)
    for T in (1, 2, 3, 5, 17, 64):
        for first in (0, 1, 1024 - T):
            y = ops.int4_linear(x[first : first + T], packed, scale)
            assert torch.equal(y, want[first : first + T]), (T, first)
    shuffled = torch.randperm(1024, generator=rng).to(device)
    assert torch.equal(ops.int4_linear(x[shuffled], packed, scale), want[shuffled])


@pytest.mark.parametrize("O, I", [(32, 32), (96, 1120), (160, 2272), (1056, 2080), (64, 4224)])
def test_rows_alone_and_among_130(O, I, device, rng):
    """Each number of rows has kernels of its own, and all have the same bits; so has each way to
    load what is not aligned."""
    x, packed, scale, _ = case(1024, O, I, torch.bfloat16, device, rng, apart=8)
    want = ops.int4_linear(x, packed, scale)
    for T in range(1, 131):
        assert torch.equal(ops.int4_linear(x[:T], packed, scale), want[:T]), T
    for first, T in [(1023, 1), (960, 64), (77, 300)]:
        part = slice(first, first + T)
        assert torch.equal(ops.int4_linear(x[part], packed, scale), want[part])
    odd = torch.empty(1024, I + 1, dtype=x.dtype, device=device)[:, 1:]
    odd.copy_(x)
    apart = torch.empty(scale.numel() + 1, dtype=scale.dtype, device=device)[1:].view_as(scale)
    apart.copy_(scale)
    for T in (1, 9, 20, 70, 1024):
        assert torch.equal(ops.int4_linear(odd[:T], packed, scale), want[:T])
        assert torch.equal(ops.int4_linear(x[:T], packed, apart), want[:T])


@pytest.mark.parametrize(
    "O, I", [(96, 1088), (1056, 2112), (8512, 2112), (96, 2048), (64, 4096), (8512, 2048)]
)
def test_long_and_short_rings(O, I, device, rng):
    """Whole pairs of tiles, equal runs and many outputs have kernels of their own."""
    x, packed, scale, _ = case(130, O, I, torch.bfloat16, device, rng, apart=8)
    want = ops.int4_linear(x, packed, scale)
    for T in (1, 8, 9, 16, 17, 32, 33, 64, 65):
        assert torch.equal(ops.int4_linear(x[:T], packed, scale), want[:T]), T


@pytest.mark.parametrize("I", [1024, 1120])
@pytest.mark.parametrize("T", [5, 13, 40, 70])
def test_other_rows_do_not_matter(T, I, device, rng):
    x, packed, scale, _ = case(T, 64, I, torch.bfloat16, device, rng, apart=8)
    want = ops.int4_linear(x, packed, scale)
    for place in {0, 1, T // 2, T - 1}:
        among = torch.full_like(x, torch.nan)
        among[::2] = torch.inf
        among[place] = x[place]
        assert torch.equal(ops.int4_linear(among, packed, scale)[place], want[place])


@pytest.mark.parametrize("I", [2048, 2176])
@pytest.mark.parametrize("T", [1, 16, 64])
def test_runs_are_equal(T, I, device, rng):
    x, packed, scale, _ = case(T, 192, I, torch.bfloat16, device, rng, apart=8)
    want = ops.int4_linear(x, packed, scale)
    for _ in range(200 if device.type == "cuda" else 2):
        assert torch.equal(ops.int4_linear(x, packed, scale), want)


@pytest.mark.parametrize("O, I", [(512, 2048), (8512, 2112)])
@pytest.mark.parametrize("T", [1, 16, 40])
def test_rows_written_just_before(T, O, I, device, rng):
    """Kernels that begin before the one before has ended wait for what it writes."""
    x, packed, scale, _ = case(130, O, I, torch.bfloat16, device, rng, apart=8)
    want = ops.int4_linear(x, packed, scale)
    slot = torch.empty_like(x[:T])
    firsts, got = range(0, 130 - T, 3), []
    for first in firsts:
        slot.copy_(x[first : first + T])
        got.append(ops.int4_linear(slot, packed, scale))
    for first, y in zip(firsts, got, strict=True):
        assert torch.equal(y, want[first : first + T]), first


def test_no_rows(device, rng):
    x, packed, scale, _ = case(0, 32, 64, torch.bfloat16, device, rng)
    assert ops.int4_linear(x, packed, scale).shape == (0, 32)


def test_registration(device, rng):
    x, packed, scale, _ = case(3, 32, 64, torch.float32, device, rng)
    opcheck(torch.ops.kdtree.int4_linear, (x, packed, scale))


def test_rejects_bad_arguments(device, rng):
    x, packed, scale, _ = case(2, 32, 64, torch.float32, device, rng)
    with pytest.raises(RuntimeError, match="I is 63, wants a multiple of 32"):
        ops.int4_linear(x[:, :63], packed, scale)
    with pytest.raises(RuntimeError, match=r"packed has shape \[1, 2, 128\], wants \[1, 1, 128\]"):
        ops.int4_linear(x[:, :32], packed, scale)
    with pytest.raises(RuntimeError, match="scale has dtype Float, wants BFloat16"):
        ops.int4_linear(x.bfloat16(), packed, scale)
    with pytest.raises(RuntimeError, match="x must have contiguous rows"):
        ops.int4_linear(x.T.contiguous().T, packed, scale)
    shifted = torch.zeros(packed.numel() + 1, dtype=torch.int32, device=device)[1:].view_as(packed)
    with pytest.raises(RuntimeError, match="packed must start on 16 bytes"):
        ops.int4_linear(x, shifted, scale)
