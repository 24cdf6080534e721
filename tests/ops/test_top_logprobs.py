import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops


def top_logprobs_ref(logits: np.ndarray, k: int):
    """ids [T, k], log-probabilities and the magnitude of what cancels in them, float64."""
    x = logits.astype(np.float64)
    ids = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    best = np.take_along_axis(x, ids, -1)
    top = x.max(-1, keepdims=True)
    log_sum = np.log(np.exp(x - top).sum(-1, keepdims=True))
    scale = 1 + np.abs(best - top) + log_sum
    return ids, best - top - log_sum, np.where(np.isfinite(scale), scale, 0)


def check(logits, k, device):
    logprob, ids = ops.top_logprobs(logits.to(device), k)
    want_ids, want, scale = top_logprobs_ref(logits.numpy(), k)
    assert np.array_equal(ids.cpu().numpy(), want_ids)
    finite = np.isfinite(want)
    assert np.array_equal(logprob.cpu().numpy() == -np.inf, ~finite)
    assert_close(
        "top_logprobs",
        torch.where(torch.from_numpy(finite), logprob.cpu(), 0),
        np.where(finite, want, 0),
        scale,
    )


@pytest.mark.parametrize(
    "T, W, k",
    [(1, 1, 1), (3, 2, 2), (5, 37, 5), (4, 64, 64), (2, 65, 64), (3, 1000, 1), (2, 4099, 17)],
)
def test_matches_float64(T, W, k, device, rng):
    check(torch.randn(T, W, generator=rng) * 3, k, device)
    check(torch.randn(T, W, generator=rng) * 40 + 100, k, device)


@pytest.mark.large
@pytest.mark.parametrize("W, k", [(163840, 16), (200001, 64)])
def test_matches_float64_at_size(W, k, device, rng):
    check(torch.randn(3, W, generator=rng) * 3, k, device)


@pytest.mark.parametrize("W", [1, 70, 1003])
@pytest.mark.parametrize("values", [[0.0, -0.0], [1.0, 2.0, 2.0, 3.0], [-np.inf, -1.0]])
def test_ties_go_to_the_lower_id(W, values, device, rng):
    """Few values, zeros of both signs and -inf among them."""
    x = torch.tensor(values)[torch.randint(0, len(values), (6, W), generator=rng)]
    x[:, -1] = max(values)  # no row of nothing but -inf
    check(x, min(W, 64), device)


def test_ties_across_a_large_row(device):
    """All equal, so that ids alone decide, through every digit of a select."""
    check(torch.zeros(1, 70000), 64, device)
    x = torch.zeros(2, 70000)
    x[:, 65000:65040] = 1
    check(x, 64, device)


def test_neighbouring_floats(device, rng):
    """Values that differ in their last bits only, and values in a wide range."""
    bits = 0x41000000 + torch.randint(0, 300, (3, 5000), generator=rng, dtype=torch.int32)
    check(bits.view(torch.float32), 33, device)
    check(torch.randn(3, 5000, generator=rng) ** 9 * 1e9, 64, device)
    check(torch.randn(3, 5000, generator=rng) * 6e37, 64, device)


def test_rows_that_are_not_finite_stay_in_bounds(device, rng):
    """A NaN, a +inf or nothing but -inf: distinct ids, no log-probability."""
    x = torch.randn(4, 300, generator=rng)
    x[0, 7], x[1, 8], x[2, :], x[3, 9] = np.nan, np.inf, -np.inf, -np.nan
    logprob, ids = ops.top_logprobs(x.to(device), 5)
    assert logprob.isnan().all()
    assert ids.min() >= 0 and ids.max() < 300
    assert all(len(set(row)) == 5 for row in ids.tolist())
    assert ids[:, 0].tolist() == [7, 8, 0, 9]


def test_rows_are_invariant(device, rng):
    """A row has the same bits alone and among 1, 2, 5, 17, 64 or 1024 rows, at any place."""
    row = torch.randn(1, 1001, generator=rng) * 3
    want = ops.top_logprobs(row.to(device), 8)
    for T in [1, 2, 5, 17, 64, 1024]:
        place = T * 2 // 3
        rows = torch.randn(T, 1001, generator=rng) * 3
        rows[place] = row
        got = ops.top_logprobs(rows.to(device), 8)
        again = ops.top_logprobs(rows.to(device), 8)
        for a, b, c in zip(got, want, again, strict=True):
            assert torch.equal(a[place], b[0]) and torch.equal(a, c)


def test_unaligned_logits(device, rng):
    flat = torch.randn(3 * 403 + 1, generator=rng).to(device)
    x = flat[1:].view(3, 403)
    got, want = ops.top_logprobs(x, 9), ops.top_logprobs(x.clone(), 9)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_rows(device):
    got = ops.top_logprobs(torch.zeros(0, 9, device=device), 3)
    assert [x.shape for x in got] == [(0, 3)] * 2


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.top_logprobs, (torch.randn(3, 50, generator=rng).to(device), 4))


def test_rejects_bad_arguments(device):
    x = torch.zeros(2, 100, device=device)
    with pytest.raises(RuntimeError, match="k is 65, wants 1 to 64"):
        ops.top_logprobs(x, 65)
    with pytest.raises(RuntimeError, match="k is 4, wants 1 to 3"):
        ops.top_logprobs(x[:, :3].contiguous(), 4)
    with pytest.raises(RuntimeError, match="k is 0, wants 1 to 64"):
        ops.top_logprobs(x, 0)
    with pytest.raises(RuntimeError, match="logits has dtype BFloat16, wants Float"):
        ops.top_logprobs(x.bfloat16(), 4)
    with pytest.raises(RuntimeError, match="logits must be contiguous"):
        ops.top_logprobs(x[:, :50], 4)
    with pytest.raises(RuntimeError, match=r"logits has shape \[100\], wants 2 dimensions"):
        ops.top_logprobs(x[0], 4)
    with pytest.raises(RuntimeError, match="logits has 0 columns, wants 1 to 16777216"):
        ops.top_logprobs(x[:, :0], 1)
