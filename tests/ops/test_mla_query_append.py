"""mla_append and mla_query in one call: their bits, whatever launches there are."""

import pytest
import torch
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-2
POSITIONS = 40


def case(T, H, P, C, R, dtype, device, rng):
    """cache, q, w_uk, kv, w, EPS, rope, position, slot"""
    pages = T // 64 + 2

    def rand(*shape):
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    q, kv = rand(T, H * (P + R) + 8)[:, : H * (P + R)], rand(T, C + R + 3)[:, 1 : C + R + 1]
    rope = torch.randn(POSITIONS, R, generator=rng).to(device)  # so that swapped halves show
    position = torch.randint(0, POSITIONS, (T,), generator=rng, dtype=torch.int32).to(device)
    slot = torch.randperm(pages * 64, generator=rng)[:T].int().to(device)
    heads = q.unflatten(1, (H, P + R)), rand(H, C, P)
    return rand(pages, 64, C + R), *heads, kv, rand(C), EPS, rope, position, slot


def check(args, interleaved):
    cache, q, w_uk, kv, w, eps, rope, position, slot = args
    want, got = cache.clone(), cache.clone()
    ops.mla_append(want, kv, w, eps, rope, position, slot, interleaved)
    query = ops.mla_query_append(got, *args[1:], interleaved)
    assert torch.equal(query, ops.mla_query(q, w_uk, rope, position, interleaved))
    assert torch.equal(got, want) and not torch.equal(got, cache)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, H, P, C, R",
    [
        (1, 1, 1, 1, 2),
        (3, 3, 7, 5, 6),
        (9, 2, 32, 130, 0),
        (35, 5, 128, 512, 64),
        (70, 2, 200, 96, 16),
        (300, 1, 128, 520, 64),
        (5, 2, 520, 40, 8),
        pytest.param(16, 64, 128, 512, 64, marks=pytest.mark.large),
    ],
)
def test_is_both(T, H, P, C, R, interleaved, dtype, device, rng):
    check(case(T, H, P, C, R, dtype, device, rng), interleaved)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [6, 90])
def test_padding(T, dtype, device, rng):
    """A padded row's query is zero and nothing of it is written, whatever it holds."""
    args = case(T, 2, 16, 24, 8, dtype, device, rng)
    cache, q, _, kv, _, _, _, position, slot = args
    position[[1, T - 1]] = slot[[1, T - 1]] = -1
    slot[2] = len(cache) * 64
    q[[1, T - 1]] = kv[[1, 2, T - 1]] = torch.nan
    check(args, True)
    got = cache.clone()
    assert not ops.mla_query_append(got, *args[1:], True)[[1, T - 1]].any()
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("T", [1, 40, 200])
def test_runs_are_equal(T, device, rng):
    args = case(T, 4, 128, 64, 16, torch.bfloat16, device, rng)
    want = ops.mla_query_append(*args, False), args[0].clone()
    for _ in range(100 if device.type == "cuda" else 2):
        args[0].zero_()
        got = ops.mla_query_append(*args, False)
        assert torch.equal(got, want[0])
        rows = args[-1].long()
        assert torch.equal(args[0].flatten(0, 1)[rows], want[1].flatten(0, 1)[rows])


def test_no_rows(device, rng):
    args = case(0, 2, 4, 8, 2, torch.float32, device, rng)
    assert ops.mla_query_append(*args, True).shape == (0, 2, 10)


def test_registration(device, rng):
    args = case(3, 2, 4, 8, 2, torch.float32, device, rng)
    opcheck(torch.ops.kdtree.mla_query_append, (*args, True))


def test_rejects_bad_arguments(device, rng):
    args = case(3, 2, 4, 8, 2, torch.float32, device, rng)

    def refused(match, **other):
        names = "cache", "q", "w_uk", "kv", "w", "eps", "rope", "position", "slot"
        given = dict(zip(names, args, strict=True)) | other
        with pytest.raises(RuntimeError, match=match):
            ops.mla_query_append(*given.values(), True)

    cache, q, w_uk, kv, w, _, rope, position, slot = args
    refused("w_uk has dtype BFloat16, wants Float", w_uk=w_uk.bfloat16())
    refused("position has dtype Long, wants Int", position=position.long())
    refused(r"slot has shape \[2\], wants \[3\]", slot=slot[:2])
    refused(r"w has shape \[7\], wants \[8\]", w=w[:7])
    refused(r"kv has shape \[3, 9\], wants \[3, 10\]", kv=kv[:, :9])
    refused(r"position has shape \[3\], wants \[2\]", kv=kv[:2], slot=slot[:2])
    half = {"cache": cache.bfloat16(), "kv": kv.bfloat16(), "w": w.bfloat16()}
    refused("cache has dtype BFloat16, wants Float", **half)
    refused("q has 2 features, wants more than rope's 2", q=q[..., :2].contiguous())
    refused("rope has no positions", rope=rope[:0])
