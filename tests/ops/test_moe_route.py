import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DEFAULTS = {
    "groups": 1, "kept_groups": 1, "scoring": "sigmoid", "group_score": "sum2",
    "normalize": True, "scale": 1.0,
}  # fmt: skip


def scores_ref(logits: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    s = np.exp(logits - logits.max(-1, keepdims=True))
    return s / s.sum(-1, keepdims=True)


def route_ref(logits, bias, K, groups, kept_groups, scoring, group_score, normalize, scale):
    """ids, weights, and per row the least margin of a choice or order, relative to the scores."""
    T, E = logits.shape
    s = scores_ref(logits.double().cpu().numpy(), scoring)
    c = s if bias is None else s + bias.double().cpu().numpy()
    grouped = np.sort(c.reshape(T, groups, E // groups), -1)[..., ::-1]
    g = grouped[..., :2].sum(-1) if group_score == "sum2" else grouped[..., 0]
    order = np.argsort(-g, axis=-1, kind="stable")
    margin = np.full(T, np.inf)
    if kept_groups < groups:
        ranked = np.take_along_axis(g, order, -1)
        margin = ranked[:, kept_groups - 1] - ranked[:, kept_groups]
    kept = np.zeros((T, groups), bool)
    np.put_along_axis(kept, order[:, :kept_groups], True, -1)
    size = np.abs(c).max(-1)
    c = np.where(kept.repeat(E // groups, -1), c, -np.inf)
    order = np.argsort(-c, axis=-1, kind="stable")
    ids = order[:, :K]
    ranked = np.take_along_axis(c, order[:, : K + 1], -1)
    if ranked.shape[1] > 1:
        margin = np.minimum(margin, (ranked[:, :-1] - ranked[:, 1:]).min(-1))
    weights = np.take_along_axis(s, ids, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return ids, weights * scale, margin / size


def check(logits, bias, K, device, **options):
    options = DEFAULTS | options
    bias_there = None if bias is None else bias.to(device)
    ids, weights = ops.moe_route(
        logits.to(device), bias_there, None, experts_per_token=K, **options
    )
    want_ids, want, margin = route_ref(logits, bias, K, **options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    clear = margin > 1e-6  # float32 scores and sums are this close to the exact ones
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(ids.cpu().numpy()[clear], want_ids[clear])
    assert_close("moe_route", weights[torch.from_numpy(clear)], want[clear])


def spread(T, E, rng):
    """Rows of distinct logits, none close to another."""
    return torch.stack([torch.randperm(E, generator=rng) for _ in range(T)]) * (6 / E) - 3


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("E", [1, 2, 3, 24, 64, 160, 255, 256, 257, 384, 512, 1024])
def test_every_size(E, scoring, device, rng):
    for K in {k for k in (1, 2, 6, 8, E) if k <= min(E, 64)}:
        logits = spread(4, E, rng)
        check(logits, None, K, device, scoring=scoring)
        top = logits.sort().values
        logits[0] = top[0]  # the winners are the last ids, best last
        bias = 0.1 * torch.randn(E, generator=rng)
        check(logits, None, K, device, scoring=scoring)
        check(logits, bias, K, device, scoring=scoring, normalize=False, scale=2.827)


@pytest.mark.parametrize("group_score", ["sum2", "max"])
@pytest.mark.parametrize(
    "E, K, groups, kept",
    [(256, 8, 8, 4), (160, 6, 8, 3), (64, 64, 4, 4), (6, 2, 6, 3), (9, 3, 3, 1)],
)
def test_groups(E, K, groups, kept, group_score, device, rng):
    options = {"groups": groups, "kept_groups": kept, "group_score": group_score}
    logits = torch.randn(17, E, generator=rng)
    bias = torch.randn(E, generator=rng)
    check(logits, bias, K, device, **options)
    check(logits, bias - 5, K, device, **options)  # every c negative: masked is -inf, not 0
    check(logits, None, K, device, scoring="softmax", **options)


def test_kimi(device, rng):
    logits, bias = torch.randn(64, 384, generator=rng), torch.randn(384, generator=rng) / 10
    check(logits, bias, 8, device, scale=2.827)


def test_group_score_is_the_two_best_and_masked_is_lowest(device):
    logits = torch.tensor([[2, 1.9, -3, -3, 0.1, 0, -3, -3]])
    bias = torch.tensor([-0.95] * 4 + [-1.2] * 4)
    options = {"groups": 2, "kept_groups": 1}
    check(logits, bias, 2, device, **options)
    ids, _ = ops.moe_route(logits.to(device), bias.to(device), None, experts_per_token=2, **options)
    assert ids.tolist() == [[0, 1]]
    # Group 1 has the best expert, group 0 the better pair.
    logits = torch.tensor([[1.0, 1, -9, -9, 2, -9, -9, -9]], device=device)
    for group_score, want in (("sum2", [0, 1]), ("max", [4, 5])):
        ids, _ = ops.moe_route(
            logits, None, None, experts_per_token=2, group_score=group_score, **options
        )
        assert ids.tolist() == [want]


def test_bias_chooses_but_does_not_weigh(device, rng):
    logits, bias = torch.randn(5, 16, generator=rng), torch.zeros(16)
    bias[0] = 5
    check(logits, bias, 4, device)
    ids, weights = ops.moe_route(
        logits.to(device), bias.to(device), None, experts_per_token=1, normalize=False
    )
    assert ids.tolist() == [[0]] * 5
    assert_close("moe_route", weights[:, 0], scores_ref(logits[:, 0].double().numpy(), "sigmoid"))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("E, K", [(1, 1), (3, 2), (160, 6), (384, 8), (384, 64)])
def test_ties_go_to_the_lower_id(E, K, scoring, device):
    ids, weights = ops.moe_route(
        torch.zeros(2, E, device=device), None, None, experts_per_token=K, scoring=scoring
    )
    assert ids.tolist() == [list(range(K))] * 2
    assert (weights == weights[0, 0]).all()


def test_group_ties_go_to_the_lower_group(device):
    logits = torch.zeros(1, 16, device=device)
    options = {"groups": 4, "kept_groups": 2}
    ids, _ = ops.moe_route(logits, None, None, experts_per_token=8, **options)
    assert ids.tolist() == [list(range(8))]
    logits[0, 9] = 1
    ids, _ = ops.moe_route(logits, None, None, experts_per_token=6, **options)
    assert ids.tolist() == [[9, 0, 1, 2, 3, 8]]
    zeros = torch.tensor([-0.0, 0.0] * 4, device=device)  # -0 and 0 tie
    ids, _ = ops.moe_route(
        torch.full((1, 8), -torch.inf, device=device), zeros, None, experts_per_token=4
    )
    assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2)])
def test_non_finite_logits_choose_real_experts(groups, kept, scoring, device, rng):
    logits = torch.randn(9, 64, generator=rng)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3] = torch.inf
    logits[4, ::2] = torch.nan
    logits[5, :40] = torch.nan
    logits[6, 7] = torch.inf
    logits[7, :60] = -torch.inf
    ids, weights = ops.moe_route(
        logits.to(device), None, None, experts_per_token=8, groups=groups, kept_groups=kept,
        scoring=scoring,
    )  # fmt: skip
    assert ids.min() >= 0 and ids.max() < 64
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert ids[1].tolist() == list(range(8))
    if scoring == "sigmoid":
        assert (ids[4] % 2 == 1).all() and (ids[5, :4] >= 40).all() and ids[6, 0] == 7
        assert weights[4].isfinite().all() and weights[0].isfinite().all()


def test_padded_rows(device, rng):
    logits = torch.randn(4, 24, generator=rng)
    logits[1] = torch.nan
    position = torch.tensor([0, -1, 5, -7], dtype=torch.int32)
    logits, position = logits.to(device), position.to(device)
    ids, weights = ops.moe_route(logits, None, position, experts_per_token=3)
    want_ids, want = ops.moe_route(logits, None, None, experts_per_token=3)
    assert ids[1].tolist() == [-1] * 3 and ids[3].tolist() == [-1] * 3
    assert (weights[1::2] == 0).all()
    assert torch.equal(ids[::2], want_ids[::2]) and torch.equal(weights[::2], want[::2])


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_row_invariance(scoring, device, rng):
    logits, bias = torch.randn(1024, 96, generator=rng).to(device), torch.randn(96, generator=rng)

    def route(x):
        return torch.cat(
            ops.moe_route(
                x, bias.to(device), None, experts_per_token=6, groups=8, kept_groups=4,
                scoring=scoring,
            ),
            1,
        )  # fmt: skip

    want = route(logits)
    assert torch.equal(route(logits), want)
    for T in (1, 2, 5, 17, 64):
        for first in (0, 3, 1024 - T):
            assert torch.equal(route(logits[first : first + T].contiguous()), want[first:][:T])


def test_no_rows(device):
    ids, weights = ops.moe_route(torch.zeros(0, 8, device=device), None, None, experts_per_token=2)
    assert ids.shape == weights.shape == (0, 2)


def test_registration(device, rng):
    logits, bias = torch.randn(3, 8, generator=rng).to(device), torch.zeros(8, device=device)
    position = torch.zeros(3, dtype=torch.int32, device=device)
    args = (2, 2, 1, "sigmoid", "sum2", True, 1.0)
    opcheck(torch.ops.kdtree.moe_route, (logits, bias, position, *args))
    opcheck(torch.ops.kdtree.moe_route, (logits, None, None, *args))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"experts_per_token": 9}, "experts_per_token is 9, wants 1 to 8"),
        ({"experts_per_token": 0}, "experts_per_token is 0, wants 1 to 8"),
        ({"groups": 3}, "groups is 3, wants a divisor of 8 experts"),
        ({"groups": 0}, "groups is 0, wants 1 to 8"),
        ({"groups": 4, "kept_groups": 5}, "kept_groups is 5, wants 1 to 4"),
        (
            {"groups": 4, "experts_per_token": 3},
            "experts_per_token is 3, wants at most the 2 experts of the kept groups",
        ),
        ({"scoring": "tanh"}, "scoring is tanh, wants sigmoid or softmax"),
        ({"group_score": "mean"}, "group_score is mean, wants sum2 or max"),
        ({"logits": torch.zeros(2, 1025)}, "experts is 1025, wants 1 to 1024"),
        ({"logits": torch.zeros(2, 8).bfloat16()}, "logits has dtype BFloat16, wants Float"),
        ({"logits": torch.zeros(8, 2).T}, "logits must be contiguous"),
        ({"bias": torch.zeros(7)}, r"bias has shape \[7\], wants \[8\]"),
        ({"position": torch.zeros(2).long()}, "position has dtype Long, wants Int"),
    ],
)
def test_rejects_bad_arguments(change, message, device):
    args = {"logits": torch.zeros(2, 8), "bias": None, "position": None, "experts_per_token": 2}
    args |= change
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    with pytest.raises(RuntimeError, match=message):
        ops.moe_route(**args)
