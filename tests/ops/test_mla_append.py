import numpy as np
import pytest
import torch
from rotation import rotate_ref
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-2  # large, so that a kernel that drops it fails
POSITIONS = 40
PAGES = 3


def case(T, C, R, dtype, device, rng, pages=PAGES):
    cache = torch.randn(pages, 64, C + R, generator=rng).to(dtype)
    kv = torch.randn(T, C + R + 3, generator=rng).to(dtype).to(device)[:, 1 : C + R + 1]
    w = torch.randn(C, generator=rng).to(dtype)
    rope = torch.randn(POSITIONS, R, generator=rng)  # any numbers, so that swapped halves show
    position = torch.randint(0, POSITIONS, (T,), generator=rng, dtype=torch.int32)
    slot = torch.randperm(pages * 64, generator=rng)[:T].int()
    return [x.to(device) for x in (cache, kv, w, rope, position, slot)]


def append(cache, kv, w, rope, position, slot, interleaved=True):
    """The cache after the rows are appended, as [slots, C + R]."""
    cache = cache.clone()
    ops.mla_append(cache, kv, w, EPS, rope, position, slot, interleaved)
    return cache.flatten(0, 1)


def mla_append_ref(kv, w, rope, position, interleaved):
    kv, w, rope = (x.double().cpu().numpy() for x in (kv, w, rope))
    C = len(w)
    latent = kv[:, :C] / np.sqrt((kv[:, :C] ** 2).mean(-1, keepdims=True) + EPS) * w
    rotated, scale = rotate_ref(kv[:, C:], rope[position.cpu().numpy()], interleaved)
    return np.concatenate([latent, rotated], -1), np.concatenate([abs(latent), scale], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, C, R", [(1, 1, 2), (3, 7, 6), (5, 130, 0), (67, 128, 16), (9, 512, 64)]
)
def test_matches_float64(T, C, R, interleaved, dtype, device, rng):
    args = case(T, C, R, dtype, device, rng)
    got = append(*args, interleaved)
    cache, kv, w, rope, position, slot = args
    want, scale = mla_append_ref(kv, w, rope, position, interleaved)
    assert_close("mla_append", got[slot.long()], want, scale)
    others = torch.ones(PAGES * 64, dtype=torch.bool, device=device)
    others[slot.long()] = False
    assert torch.equal(got[others], cache.flatten(0, 1)[others])


@pytest.mark.parametrize("bad", [-1, -(2**31), PAGES * 64, 2**31 - 1])
def test_padding(bad, device, rng):
    """A row whose slot is not in the cache writes nothing; positions stay inside the table."""
    cache, kv, w, rope, position, slot = case(4, 8, 4, torch.float32, device, rng)
    slot[1], position[1], kv[1] = bad, -1, float("nan")
    position[2] = 2**31 - 1
    got = append(cache, kv, w, rope, position, slot)
    position[2] = POSITIONS - 1
    keep = [0, 2, 3]
    want = append(cache, kv[keep], w, rope, position[keep], slot[keep])
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R", [(130, 6), (37, 0)])
def test_row_invariance(C, R, dtype, device, rng):
    """A row has the same bits alone and among 1, 2, 5, 17, 64 or 1024 rows, at any place."""
    cache, kv, w, rope, position, slot = case(1024, C, R, dtype, device, rng, pages=17)
    whole = append(cache, kv, w, rope, position, slot)
    for T in (1, 2, 5, 17, 64, 1024):
        rows = torch.randperm(1024, generator=rng)[:T].to(device)
        want = cache.flatten(0, 1).clone()
        want[slot[rows].long()] = whole[slot[rows].long()]
        for _ in range(2):
            some = append(cache, kv[rows].contiguous(), w, rope, position[rows], slot[rows])
            assert torch.equal(some, want), T


def test_no_rows(device, rng):
    args = case(0, 8, 2, torch.float32, device, rng)
    assert torch.equal(append(*args), args[0].flatten(0, 1))


def test_registration(device, rng):
    cache, kv, w, rope, position, slot = case(3, 8, 2, torch.float32, device, rng)
    opcheck(torch.ops.kdtree.mla_append, (cache, kv, w, EPS, rope, position, slot, True))


def test_rejects_bad_arguments(device, rng):
    cache, kv, w, rope, position, slot = case(3, 8, 2, torch.float32, device, rng)
    with pytest.raises(RuntimeError, match="cache has pages of 32 tokens, wants 64"):
        append(cache[:, :32].contiguous(), kv, w, rope, position, slot)
    with pytest.raises(RuntimeError, match=r"kv has shape \[3, 9\], wants \[3, 10\]"):
        append(cache, kv[:, :9], w, rope, position, slot)
    with pytest.raises(RuntimeError, match="kv has dtype BFloat16, wants Float"):
        append(cache, kv.bfloat16(), w, rope, position, slot)
    with pytest.raises(RuntimeError, match=r"w has shape \[7\], wants \[8\]"):
        append(cache, kv, w[:7], rope, position, slot)
    with pytest.raises(RuntimeError, match=r"slot has shape \[2\], wants \[3\]"):
        append(cache, kv, w, rope, position, slot[:2])
    with pytest.raises(RuntimeError, match="cache must be contiguous"):
        ops.mla_append(cache[..., :9], kv[:, :9], w[:7], EPS, rope, position, slot, True)
    with pytest.raises(RuntimeError, match="kv must have contiguous rows"):
        append(cache, torch.zeros(10, 3, device=device).T, w, rope, position, slot)
