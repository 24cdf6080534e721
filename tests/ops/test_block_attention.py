from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from rotation import rotate_ref
from tolerance import assert_close
from torch import Tensor
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-2  # large, so that a kernel that drops it fails


@dataclass
class Case:
    """Cache rows that no slot sees are NaN."""

    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    eps: float
    rope: Tensor
    cache: Tensor
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

    B, positions = len(lengths), min(max(lengths) + N, 1200)  # a long block ends beyond the table
    angle = torch.rand(positions, width // 2, generator=rng) * 7
    case = Case(
        rand(B, N, heads + 2 * kv_heads, width),
        (1.5 + 0.2 * rand(width)).to(dtype),  # scores of sigma 1.5: no key decides alone
        (1 + 0.2 * rand(width)).to(dtype),
        EPS,
        torch.cat([angle.cos(), angle.sin()], 1) * 1.1,  # an amplitude, as YaRN has one
        rand(B, S, 2, kv_heads, width),
        torch.tensor(lengths, dtype=torch.int32),
        window,
        causal,
        width**-0.5,
    )
    for b in range(B):
        unseen = sorted(set(range(S)) - {p % S for p in case.positions(b)})
        case.cache[b, unseen] = float("nan")
    return case


def turned(x, norm, case) -> np.ndarray:
    """Heads [B, N, heads, width], normed and rotated."""
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * norm
    position = case.length.numpy()[:, None] + np.arange(x.shape[1])
    table = case.rope.double().numpy()[np.minimum(position, len(case.rope) - 1)]
    return rotate_ref(x, table[:, :, None], interleaved=False)[0]


def block_attention_ref(case) -> tuple[np.ndarray, np.ndarray]:
    """An untiled softmax a row; returns the output and the sums of its absolute terms."""
    qkv, q_norm, k_norm, cache = (
        x.double().numpy() for x in (case.qkv, case.q_norm, case.k_norm, case.cache)
    )
    S, G = cache.shape[1], cache.shape[3]
    B, N, H = qkv.shape[0], qkv.shape[1], qkv.shape[2] - 2 * G
    q, k, v = np.split(qkv, [H, H + G], 2)
    q, k = turned(q, q_norm, case), turned(k, k_norm, case)
    want, scale = np.zeros_like(q), np.zeros_like(q)
    for b, i, h in np.ndindex(B, N, H):
        g, at = h // (H // G), int(case.length[b]) + i
        seen = [(*cache[b, p % S, :, g], p) for p in case.positions(b)]
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
        ([0], 1, 1, 1, 1, 2),
        ([0, 1, 5, 31], 3, 40, 3, 1, 6),
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
    case.q_norm.zero_()
    check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_depend_on_their_sequence_alone(dtype, device, rng):
    """Not on the other sequences, nor on how many rows the cache has."""
    case = random_case([700, 17, 0, 1100], 8, 1200, 4, 2, 32, dtype, rng).to(device)
    whole = case.run()
    assert torch.equal(whole, case.run())
    for b in range(4):
        own = {name: getattr(case, name)[b : b + 1] for name in ("qkv", "cache", "length")}
        assert torch.equal(replace(case, **own).run(), whole[b : b + 1])
        room = torch.full_like(own["cache"], float("nan"))
        own["cache"] = torch.cat([own["cache"], room], 1)
        assert torch.equal(replace(case, **own).run(), whole[b : b + 1])


def test_lengths_out_of_range_stay_within_the_cache(device, rng):
    """Below 0 is as good as 0; beyond the cache as good as all of it, but for the rotation."""
    case = random_case([0, 40], 4, 40, 2, 1, 8, torch.float32, rng).to(device)
    case.rope[:] = case.rope[-1].clone()
    want = case.run()
    case.length = torch.tensor([-5, 2**31 - 100], dtype=torch.int32, device=device)
    assert torch.equal(case.run(), want)


def test_empty(device, rng):
    case = random_case([3], 4, 8, 2, 1, 8, torch.float32, rng).to(device)
    case.qkv = case.qkv[:, :0].contiguous()
    assert case.run().shape == (1, 0, 2, 8)


def test_registration(device, rng):
    case = random_case([3, 9], 4, 8, 2, 1, 8, torch.float32, rng, window=5).to(device)
    opcheck(torch.ops.kdtree.block_attention, tuple(vars(case).values()))


def test_rejects_bad_arguments(device, rng):
    good = vars(random_case([3, 9], 4, 16, 4, 2, 8, torch.float32, rng).to(device))

    def rejects(message, **bad):
        with pytest.raises(RuntimeError, match=message):
            ops.block_attention(*(good | bad).values())

    qkv, cache, norm = good["qkv"], good["cache"], good["k_norm"]
    rejects(r"qkv has shape \[2, 4, 64\], wants 4 dimensions", qkv=qkv.flatten(2))
    rejects("qkv must be contiguous", qkv=qkv.transpose(1, 2).contiguous().transpose(1, 2))
    rejects(r"cache has shape \[2, 16, 1, 2, 8\], wants \[2, 16, 2, 2, 8\]", cache=cache[:, :, :1])
    rejects("cache has dtype BFloat16, wants Float", cache=cache.bfloat16())
    rejects(r"q_norm has shape \[7\], wants \[8\]", q_norm=norm[:7])
    rejects("k_norm has dtype BFloat16, wants Float", k_norm=norm.bfloat16())
    rejects(r"rope has shape \[13, 6\], wants \[13, 8\]", rope=good["rope"][:, :6])
    rejects("rope has no positions", rope=good["rope"][:0])
    rejects("length has dtype Long, wants Int", length=good["length"].long())
    rejects("qkv has 7 heads, wants a multiple of the cache's 2", qkv=qkv[:, :, :7].contiguous())
    rejects("window is 18, wants 0 to 17", window=18)
    rejects("scale is 0, wants a number above 0", scale=0.0)
    rejects("window is -1, wants 0 to 17", window=-1)
    doubles = {name: good[name].double() for name in ("qkv", "q_norm", "k_norm", "cache")}
    rejects("qkv has dtype Double, wants Float or BFloat16", **doubles)

    def of_width(width, rows=1):
        shapes = {"qkv": (1, 1, 3, width), "cache": (1, rows, 2, 1, width), "rope": (1, width)}
        shapes |= {"q_norm": (width,), "k_norm": (width,)}
        made = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
        return made | {"length": good["length"][:1]}

    rejects("qkv has width 258, wants at most 256", **of_width(258))
    rejects("heads have 7 features, wants an even number", **of_width(7))
    rejects("cache has no rows", **of_width(8, rows=0))
