from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch import Tensor
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """Cache rows that no slot sees are NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache_k: Tensor
    cache_v: Tensor
    length: Tensor
    window: int
    causal: bool
    scale: float

    def run(self) -> Tensor:
        return ops.block_attention(*vars(self).values())

    def to(self, device) -> "Case":
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Case(**moved)

    def positions(self, b: int) -> range:
        """The cached positions that the first slot sees, which sees the most."""
        length = int(self.length[b])
        return range(max(0, length - self.window + 1) if self.window else 0, length)


def random_case(lengths, N, S, heads, kv_heads, width, dtype, rng, window=0, causal=False) -> Case:
    def rand(*shape):
        return torch.randn(shape, generator=rng).to(dtype)

    B = len(lengths)
    case = Case(
        1.5 * rand(B, N, heads, width),  # scores of sigma 1.5: no key decides alone
        rand(B, N, kv_heads, width),
        rand(B, N, kv_heads, width),
        rand(B, S, kv_heads, width),
        rand(B, S, kv_heads, width),
        torch.tensor(lengths, dtype=torch.int32),
        window,
        causal,
        width**-0.5,
    )
    for b in range(B):
        unseen = sorted(set(range(S)) - {p % S for p in case.positions(b)})
        case.cache_k[b, unseen] = case.cache_v[b, unseen] = float("nan")
    return case


def block_attention_ref(case) -> tuple[np.ndarray, np.ndarray]:
    """An untiled softmax a row; returns the output and the sums of its absolute terms."""
    q, k, v, cache_k, cache_v = (
        x.double().numpy() for x in (case.q, case.k, case.v, case.cache_k, case.cache_v)
    )
    B, N, H, _ = q.shape
    S, G = cache_k.shape[1:3]
    want, scale = np.zeros_like(q), np.zeros_like(q)
    for b, i, h in np.ndindex(B, N, H):
        g, at = h // (H // G), int(case.length[b]) + i
        seen = [(cache_k[b, p % S, g], cache_v[b, p % S, g], p) for p in case.positions(b)]
        slots = [(k[b, j, g], v[b, j, g], int(case.length[b]) + j) for j in range(N)]
        seen += [slot for slot in slots if not case.causal or slot[2] <= at]
        seen = [s for s in seen if not case.window or abs(at - s[2]) < case.window]
        keys, values = np.array([s[0] for s in seen]), np.array([s[1] for s in seen])
        score = case.scale * keys @ q[b, i, h]
        weight = np.exp(score - score.max())
        weight /= weight.sum()
        want[b, i, h], scale[b, i, h] = weight @ values, weight @ abs(values)
    return want, scale


def check(case, device):
    assert_close("block_attention", case.to(device).run(), *block_attention_ref(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "lengths, N, S, heads, kv_heads, width",
    [
        ([0], 1, 1, 1, 1, 1),
        ([0, 1, 5, 31], 3, 40, 3, 1, 7),
        ([32, 33, 24, 25, 63], 8, 64, 8, 2, 32),
        ([100, 7], 16, 130, 6, 6, 48),
        ([1500, 1300], 8, 1500, 4, 2, 64),
        pytest.param([3000], 8, 4096, 64, 8, 128, marks=pytest.mark.large),
        ([200], 5, 256, 5, 1, 256),
    ],
)
def test_matches_float64(lengths, N, S, heads, kv_heads, width, causal, dtype, device, rng):
    check(random_case(lengths, N, S, heads, kv_heads, width, dtype, rng, causal=causal), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window, S", [(1, 1), (2, 1), (4, 8), (9, 9), (9, 8), (64, 70), (200, 256)]
)
def test_window_over_a_ring(window, S, causal, dtype, device, rng):
    lengths = [0, 1, 7, 8, 9, 63, 64, 65, 1000]
    check(random_case(lengths, 7, S, 4, 2, 16, dtype, rng, window, causal), device)


@pytest.mark.parametrize("window", [0, 20])
def test_mean_of_visible(window, device, rng):
    """With q = 0 every visible key weighs the same: one too many or too few shows at once."""
    case = random_case([37, 64], 6, 64, 4, 2, 8, torch.float32, rng, window, causal=True)
    case.q.zero_()
    check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_depend_on_their_sequence_alone(dtype, device, rng):
    """Not on the other sequences, nor on how many rows the cache has."""
    case = random_case([700, 17, 0, 1100], 8, 1200, 4, 2, 32, dtype, rng).to(device)
    whole = case.run()
    assert torch.equal(whole, case.run())
    for b in range(4):
        alone = {k: v[b : b + 1] if isinstance(v, Tensor) else v for k, v in vars(case).items()}
        assert torch.equal(Case(**alone).run(), whole[b : b + 1])
        room = torch.full_like(alone["cache_k"], float("nan"))
        for name in ("cache_k", "cache_v"):
            alone[name] = torch.cat([alone[name], room], 1)
        assert torch.equal(Case(**alone).run(), whole[b : b + 1])


def test_lengths_out_of_range_stay_within_the_cache(device, rng):
    """Below 0 is as good as 0; beyond the cache as good as all of it."""
    case = random_case([0, 40], 4, 40, 2, 1, 8, torch.float32, rng).to(device)
    want = case.run()
    case.length = torch.tensor([-5, 2**31 - 100], dtype=torch.int32, device=device)
    assert torch.equal(case.run(), want)


def test_empty(device, rng):
    case = random_case([3], 4, 8, 2, 1, 8, torch.float32, rng).to(device)
    case.q, case.k, case.v = (x[:, :0].contiguous() for x in (case.q, case.k, case.v))
    assert case.run().shape == (1, 0, 2, 8)


def test_registration(device, rng):
    case = random_case([3, 9], 4, 8, 2, 1, 8, torch.float32, rng, window=5).to(device)
    opcheck(torch.ops.kdtree.block_attention, tuple(vars(case).values()))


def test_rejects_bad_arguments(device, rng):
    good = vars(random_case([3, 9], 4, 16, 4, 2, 8, torch.float32, rng).to(device))

    def rejects(message, **bad):
        with pytest.raises(RuntimeError, match=message):
            ops.block_attention(*(good | bad).values())

    q, k, cache = good["q"], good["k"], good["cache_k"]
    rejects(r"q has shape \[2, 4, 32\], wants 4 dimensions", q=q.flatten(2))
    rejects("q must be contiguous", q=q.transpose(1, 2).contiguous().transpose(1, 2))
    rejects(r"k has shape \[2, 3, 2, 8\], wants \[2, 4, 2, 8\]", k=k[:, :3].contiguous())
    rejects("v has dtype BFloat16, wants Float", v=k.bfloat16())
    rejects(r"cache_v has shape \[2, 15, 2, 8\]", cache_v=cache[:, :15].contiguous())
    rejects("length has dtype Long, wants Int", length=good["length"].long())
    rejects("q has 3 heads, wants a multiple of the cache's 2", q=q[:, :, :3].contiguous())
    rejects("window is 18, wants 0 to 17", window=18)
    rejects("scale is 0, wants a number above 0", scale=0.0)
    rejects("window is -1, wants 0 to 17", window=-1)
    doubles = {name: x.double() for name, x in good.items() if name in ("q", "k", "v")}
    doubles |= {name: good[name].double() for name in ("cache_k", "cache_v")}
    rejects("q has dtype Double, wants Float or BFloat16", **doubles)
    wide = {name: torch.zeros(1, 1, 1, 257, device=device) for name in list(good)[:5]}
    rejects("q has width 257, wants at most 256", **wide, length=good["length"][:1])
    empty = cache[:, :0].contiguous()
    rejects("cache_k has no rows", cache_k=empty, cache_v=empty)
