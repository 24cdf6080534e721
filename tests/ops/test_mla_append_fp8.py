"""FP8 latents: conversions are torch's for every number, and rows are those of the contract."""

import numpy as np
import pytest
import torch
from fp8_rows import E4M3, POISON, parts
from test_mla_append import EPS, PAGES, case, mla_append_ref
from tolerance import ROUNDINGS, U, assert_close
from torch.library import opcheck

from kdtree import ops
from kdtree.cache import fp8_row_bytes

DTYPES = [torch.float32, torch.bfloat16]


def fp8_case(T, C, R, dtype, device, rng, pages=PAGES):
    cache, *rest = case(T, C, R, dtype, device, rng, pages)
    shape = (pages, 64, fp8_row_bytes(C, R))
    return [torch.full(shape, POISON, dtype=torch.uint8, device=device), *rest]


def append(cache, kv, w, rope, position, slot, interleaved=True, eps=EPS):
    """The cache after the rows are appended, as [slots, bytes]."""
    cache = cache.clone()
    ops.mla_append(cache, kv, w, eps, rope, position, slot, interleaved)
    return cache.flatten(0, 1)


def appended(w, device):
    """Codes and scale of one latent that is w itself, by torch's view of them."""
    C = len(w)
    args = torch.ones(1, C), w, torch.zeros(1, 0), *torch.zeros(2, 1, dtype=torch.int32)
    cache = torch.full((1, 64, fp8_row_bytes(C, 0)), POISON, dtype=torch.uint8, device=device)
    codes, scale, _ = parts(append(cache, *(x.to(device) for x in args), eps=0.0)[0], C, 0)
    return codes, float(scale)


def padded(x):
    """To a whole row, by zeros."""
    return torch.nn.functional.pad(x, (0, -len(x) % 16))


def numbers() -> torch.Tensor:
    """Every bfloat16 of at most 448, every e4m3, every midpoint of two, and their neighbours."""
    bf16 = torch.arange(65536).to(torch.int16).view(torch.bfloat16).float()
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    edges = torch.cat([codes, (codes[1:] + codes[:-1]) / 2])
    bits = edges.view(torch.int32)
    beside = torch.cat([bits + d for d in (-2, -1, 0, 1, 2)])
    beside = beside[beside >= 0].view(torch.float32)
    x = torch.cat([bf16, beside, -beside])
    return x[x.abs() <= 448]


def test_every_number_is_rounded_as_torch_does(device):
    x = padded(numbers())
    assert x.abs().max() == 448 and len(x) > 37000
    codes, scale = appended(x, device)
    assert scale == 1
    assert torch.equal(codes.view(torch.uint8), x.to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("most", [447.9, 3.0, 1e-3, 2.0**-126, 1e-44, 3e38])
def test_scale(most, device):
    """The largest is 448 of the scale's; where a scale would be 0, so are the codes and it is 1."""
    x = padded(torch.cat([torch.linspace(-most, most, 99, dtype=torch.float64).float()]))
    codes, scale = appended(x, device)
    want = float(x.abs().max() / 448) or 1.0
    assert scale == want
    limited = (x / want).clamp(-448, 448)
    assert torch.equal(codes.view(torch.uint8), limited.to(E4M3).view(torch.uint8))


def test_zeros_and_nan(device):
    codes, scale = appended(torch.zeros(16), device)
    assert scale == 1 and not codes.view(torch.uint8).any()
    x = torch.arange(16.0)
    x[5] = float("nan")
    codes, scale = appended(x, device)
    assert codes.float().isnan().nonzero().tolist() == [[5]] and scale == 15 / np.float32(448)
    x[5] = float("inf")
    assert appended(x, device)[0][5].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, C, R", [(1, 16, 2), (3, 48, 6), (5, 144, 0), (67, 128, 16), (9, 512, 64)]
)
def test_matches_float64(T, C, R, interleaved, dtype, device, rng):
    """The scale, and each code one of the two about its number, the nearer one but for the norm's
    roundings; nothing else of a row is written, and no other row."""
    args = fp8_case(T, C, R, dtype, device, rng)
    got = append(*args, interleaved).cpu()
    cache, kv, w, rope, position, slot = args
    slot = slot.cpu()
    want, size = mla_append_ref(kv, w, rope, position, interleaved)
    codes, scale, rotated = parts(got[slot.long()], C, R)
    if R:
        assert_close("mla_append", rotated, want[:, C:], size[:, C:])
    assert_close("mla_append", scale[:, 0], abs(want[:, :C]).max(-1) / 448)
    number = want[:, :C] / scale.double().numpy()
    exponent = np.floor(np.log2(np.maximum(abs(number), 2.0**-6)))
    error = (ROUNDINGS["mla_append"][torch.float32] + 2) * U[torch.float32] * abs(number)
    off = abs(codes.double().numpy() - number)
    assert (off <= 2.0 ** (exponent - 4) + error).all()
    untouched = got.clone()
    untouched[slot.long(), : C + 4] = POISON
    untouched[slot.long(), C + 16 : C + 16 + 2 * R] = POISON
    assert (untouched == POISON).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding(dtype, device, rng):
    cache, kv, w, rope, position, slot = fp8_case(4, 16, 4, dtype, device, rng)
    slot[1], position[1], kv[1] = -1, -1, float("nan")
    slot[3] = PAGES * 64
    got = append(cache, kv, w, rope, position, slot)
    keep = [0, 2]
    want = append(cache, kv[keep], w, rope, position[keep], slot[keep])
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R", [(144, 6), (512, 64)])
def test_row_invariance(C, R, dtype, device, rng):
    """A row has the same bits alone and among 1, 2, 5, 17, 64 or 1024 rows, at any place."""
    cache, kv, w, rope, position, slot = fp8_case(1024, C, R, dtype, device, rng, pages=17)
    whole = append(cache, kv, w, rope, position, slot)
    for T in (1, 2, 5, 17, 64, 1024):
        rows = torch.randperm(1024, generator=rng)[:T].to(device)
        want = cache.flatten(0, 1).clone()
        want[slot[rows].long()] = whole[slot[rows].long()]
        some = append(cache, kv[rows].contiguous(), w, rope, position[rows], slot[rows])
        assert torch.equal(some, want), T


def test_registration(device, rng):
    cache, kv, w, rope, position, slot = fp8_case(3, 16, 2, torch.float32, device, rng)
    opcheck(torch.ops.kdtree.mla_append, (cache, kv, w, EPS, rope, position, slot, True))


def test_rejects_bad_arguments(device, rng):
    cache, kv, w, rope, position, slot = fp8_case(3, 16, 2, torch.float32, device, rng)
    with pytest.raises(RuntimeError, match="cache has rows of 47 bytes, wants 48 for FP8 latents"):
        append(cache[..., :47].contiguous(), kv, w, rope, position, slot)
    with pytest.raises(RuntimeError, match="FP8, but have 15 features, wants a multiple of 16"):
        append(cache, kv[:, :17], w[:15], rope, position, slot)
    with pytest.raises(RuntimeError, match=r"kv has shape \[3, 17\], wants \[3, 18\]"):
        append(cache, kv[:, :17], w, rope, position, slot)
    with pytest.raises(RuntimeError, match="w has dtype BFloat16, wants Float"):
        append(cache, kv, w.bfloat16(), rope, position, slot)
    with pytest.raises(RuntimeError, match="kv has dtype Double, wants Float or BFloat16"):
        append(cache, kv.double(), w.double(), rope, position, slot)
