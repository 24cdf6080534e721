import numpy as np
import pytest
import torch
from sample_reference import check, philox, run
from torch.library import opcheck

from kdtree import ops

# Published answers of Philox4x32-10.
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_reference_philox_knows_its_answers(counter, key, words):
    assert " ".join(f"{int(w):08x}" for w in philox(counter, key)) == words


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**40 + 7, 2**63 - 1, -1, -(2**63)])
def test_seeds_of_64_bits(seed, device):
    """Equal logits: the noise alone decides, so any wrong bit of a seed or position shows."""
    positions = [[0, 1, 2, 1000, 2**31 - 2, 2**31 - 1]]
    check(torch.zeros(1, 6, 1001), positions, device, seed, 1.0)


@pytest.mark.parametrize("B, N, W", [(1, 1, 1), (2, 3, 2), (3, 2, 5), (2, 5, 63), (3, 4, 1000)])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.5])
def test_matches_reference(B, N, W, temperature, device, rng):
    logits = torch.randn(B, N, W, generator=rng) * 3
    position = torch.arange(B * N).view(B, N)
    check(logits, position, device, np.arange(B) + 11, temperature)


@pytest.mark.large
@pytest.mark.parametrize("W", [163840, 200001])
@pytest.mark.parametrize("filters", [(), (50, 1.0, 0.0), (0, 0.95, 0.0), (400, 0.9, 0.02)])
def test_matches_reference_at_size(W, filters, device, rng):
    check(torch.randn(1, 4, W, generator=rng) * 4, [[5, 6, 7, 8]], device, 3, 1.0, *filters)


def test_rows_use_their_sequence(device, rng):
    """Every parameter differs between the sequences."""
    logits = torch.randn(4, 6, 300, generator=rng) * 2
    position = torch.arange(24).view(4, 6) * 7
    seed, temperature = np.array([5, 6, -7, 2**35]), np.array([0.0, 0.7, 1.0, 3.0])
    top_k, top_p, min_p = (
        np.array([2, 0, 9, 0]),
        np.array([1, 0.8, 1, 0.99]),
        np.array([0, 0, 0, 0.1]),
    )
    check(logits, position, device, seed, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_have_the_distribution(top_p, device):
    """Chi-square of 20000 draws; no draw of a filtered token."""
    p = np.array([0.31, 0.05, 0.24, 0.2, 0.08, 0.12])
    logits = torch.tensor(np.log(p) + 2, dtype=torch.float32).expand(1, 20000, 6).contiguous()
    token, _, _ = run(logits, torch.arange(20000).view(1, -1), device, 12, top_p=top_p)
    kept = (
        np.ones(6, dtype=bool) if top_p == 1 else p > 0.06
    )  # 0.95 of the mass, without 0.08: 0.87
    want = np.where(kept, p, 0) / p[kept].sum() * 20000
    count = np.bincount(token.flatten().cpu().numpy(), minlength=6)
    assert count[~kept].sum() == 0
    statistic = ((count[kept] - want[kept]) ** 2 / want[kept]).sum()
    assert statistic < {5: 20.515, 4: 18.467}[int(kept.sum()) - 1]  # p = 0.001


def test_seeds_and_positions_differ(device):
    logits = torch.zeros(8, 64, 5000)
    token, _, _ = run(logits, torch.arange(64).expand(8, 64), device, torch.arange(8))
    assert len(set(token.flatten().tolist())) > 450  # 512 draws of 5000: 25 meet by chance


def test_temperature_0_ignores_filters_and_takes_the_lower_id(device, rng):
    logits = torch.randint(0, 3, (2, 9, 130), generator=rng).float()
    logits[0, 0] = torch.where(logits[0, 0] > 1, -0.0, -1.0)
    logits[0, 0, 100] = 0.0
    want = torch.from_numpy(np.argmax(logits.numpy(), -1))
    token, _, _ = run(logits, 3, device, 1, 0.0, top_k=1, top_p=0.1, min_p=0.9)
    assert torch.equal(token.cpu(), want)


def test_rows_are_invariant(device, rng):
    """The same row, seed and position: the same bits in any batch, at any place."""
    row = torch.randn(1, 1, 1003, generator=rng) * 3
    for filters in [{}, {"temperature": 0.0}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}]:
        want = run(row, 77, device, 5, **filters)
        for B, N in [(1, 2), (5, 1), (1, 17), (4, 16), (64, 16)]:
            b, n = B // 2, N * 2 // 3
            logits = torch.randn(B, N, 1003, generator=rng) * 3
            logits[b, n] = row
            got, again = (run(logits, 77, device, 5, **filters) for _ in range(2))
            for a, w, c in zip(got, want, again, strict=True):
                assert torch.equal(a[b, n], w[0, 0]) and torch.equal(a, c)


def test_masked_logits(device, rng):
    """-inf is never drawn, not even where a filter asks for more ids than there are."""
    logits = torch.randn(1, 100, 40, generator=rng)
    logits[..., torch.randperm(40, generator=rng)[:37]] = -np.inf
    for filters in [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 0.0}]:
        token, logprob, finite = run(logits, torch.arange(100).view(1, -1), device, 2, **filters)
        assert finite.all() and logprob.isfinite().all()
        assert logits.to(device).gather(-1, token[..., None]).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}])
def test_rows_that_are_not_finite(temperature, filters, device, rng):
    logits = torch.randn(1, 7, 201, generator=rng)
    logits[0, 0, 200] = np.nan
    logits[0, 1, 3] = -np.nan
    logits[0, 2, 64] = np.inf
    logits[0, 3, :] = -np.inf
    logits[0, 4, 7] = -np.inf  # legal
    token, logprob, finite = run(logits, 5, device, 0, temperature, **filters)
    assert finite.tolist() == [[False] * 4 + [True] * 3]
    assert token[0, :4].tolist() == [-1] * 4 and logprob[0, :4].tolist() == [0] * 4
    assert token[0, 4:].min() >= 0 and (logprob[0, 4:] < 0).all()


def test_padded_rows_are_not_read(device, rng):
    logits = torch.randn(2, 3, 99, generator=rng)
    position = torch.tensor([[4, -1, 6], [-1, -(2**31), 0]])
    want = run(logits, position, device, 1)
    logits[position < 0] = np.nan
    got = run(logits, position, device, 1)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    token, logprob, finite = (x.cpu() for x in got)
    padded = position < 0
    assert (token[padded] == -1).all() and (logprob[padded] == 0).all() and finite.all()
    assert (token[~padded] >= 0).all()


def test_extreme_temperatures(device, rng):
    """A tiny one overflows every quotient and still draws a best id; a huge one is uniform."""
    logits = torch.randn(1, 50, 30, generator=rng) - 5
    logits[..., 0] = -np.inf
    token, _, finite = run(logits, torch.arange(50).view(1, -1), device, 0, 1e-42)
    assert finite.all() and (token > 0).all()
    token, _, _ = run(logits, torch.arange(50).view(1, -1), device, 0, 3e38)
    assert len(set(token.flatten().tolist())) > 15


def test_unaligned_logits(device, rng):
    flat = torch.randn(6 * 403 + 1, generator=rng).to(device)
    x = flat[1:].view(2, 3, 403)
    got, want = (run(x_, 4, device, 3, top_k=30) for x_ in (x, x.clone()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_devices_draw_alike(device, rng):
    """Noise, filters and masses are exact, so the tokens are the CPU's, near-ties included."""
    logits = (torch.randn(2, 16, 5003, generator=rng) * 2).to(torch.bfloat16).float()
    position = torch.arange(32).view(2, 16)
    for filters in [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 99, "top_p": 0.8, "min_p": 0.01}]:
        got, want = (run(logits, position, d, 21, 0.9, **filters) for d in (device, "cpu"))
        assert torch.equal(got[0].cpu(), want[0])


def test_no_rows(device):
    for shape in [(0, 3, 9), (2, 0, 9)]:
        assert [x.shape for x in run(torch.zeros(shape), 0, device)] == [shape[:2]] * 3


def test_registration(device, rng):
    B = 2
    args = (
        torch.randn(B, 3, 40, generator=rng),
        torch.zeros(B, 3, dtype=torch.int32),
        torch.zeros(B, dtype=torch.int64),
        torch.ones(B),
        torch.zeros(B, dtype=torch.int32),
        torch.ones(B),
        torch.zeros(B),
    )
    args = tuple(x.to(device) for x in args)
    opcheck(torch.ops.kdtree.sample, (*args, None))
    opcheck(torch.ops.kdtree.sample, (*args, args[0] + 1))


def test_rejects_bad_arguments(device):
    x = torch.zeros(2, 3, 8, device=device)
    position = torch.zeros(2, 3, dtype=torch.int32, device=device)
    seed = torch.zeros(2, dtype=torch.int64, device=device)
    ones, none = torch.ones(2, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    good = [x, position, seed, ones, none, ones, ones]

    def rejects(place, value, match):
        with pytest.raises(RuntimeError, match=match):
            ops.sample(*good[:place], value, *good[place + 1 :])

    rejects(0, x.double(), "logits has dtype Double, wants Float")
    rejects(0, x[0], r"logits has shape \[3, 8\], wants 3 dimensions")
    rejects(0, x.mT.contiguous().mT, "logits must be contiguous")
    rejects(0, x[:, :, :0], "logits has 0 columns, wants 1 to 16777216")
    rejects(1, position[:, :2], r"position has shape \[2, 2\], wants \[2, 3\]")
    rejects(2, none, "seed has dtype Int, wants Long")
    rejects(3, ones.double(), "temperature has dtype Double, wants Float")
    rejects(4, seed, "top_k has dtype Long, wants Int")
    rejects(5, ones[:1], r"top_p has shape \[1\], wants \[2\]")
    rejects(6, none, "min_p has dtype Int, wants Float")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_of_the_raw_logits(temperature, device, rng):
    """Where nothing is masked the bits are the same; where something is, the raw row counts."""
    raw = torch.randn(1, 40, 333, generator=rng).to(device)
    position = torch.arange(40, dtype=torch.int32, device=device)[None]
    values = (9, temperature, 0, 1.0, 0.0)
    dtypes = (torch.int64, torch.float32, torch.int32, torch.float32, torch.float32)
    each = [torch.tensor([v], dtype=t, device=device) for v, t in zip(values, dtypes, strict=True)]
    token, logprob, _ = ops.sample(raw, position, *each)
    masked = raw.clone()
    masked[0, ::2].scatter_(1, token[0, ::2, None], float("-inf"))
    other, got, finite = ops.sample(masked, position, *each, raw)
    assert finite.all() and (other[0, ::2] != token[0, ::2]).all()
    assert torch.equal(other[0, 1::2], token[0, 1::2])
    assert torch.equal(got[0, 1::2], logprob[0, 1::2])
    best, ids = ops.top_logprobs(raw[0], 64)
    for n in range(40):
        among = dict(zip(ids[n].tolist(), best[n].tolist(), strict=True))
        assert among.get(int(other[0, n]), float(got[0, n])) == float(got[0, n])
