import math

import numpy as np
import pytest
import torch
from sample_reference import check, gumbel_ref, kept_ref, run

FILTERS = [(1, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (7, 0.8, 0.1)]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_filters_match_reference(filters, temperature, device, rng):
    logits = torch.randn(2, 40, 77, generator=rng) * 2
    check(logits, torch.arange(80).view(2, 40), device, [1, 2], temperature, *filters)


def support(row, device, draws=400, **filters):
    """The ids that draws reach."""
    logits = torch.as_tensor(row, dtype=torch.float32).expand(1, draws, len(row)).contiguous()
    token, _, _ = run(logits, torch.arange(draws).view(1, -1), device, 9, **filters)
    return set(token.flatten().tolist())


def test_filter_boundaries(device):
    """Ties that cross a boundary stay by lower id; the token that crosses top_p is kept."""
    tied = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert support(tied, device, top_k=2) == {1, 2}
    assert support(tied, device, top_k=4) == {1, 2, 4, 0}
    assert support(tied, device, top_k=6) == support(tied, device, top_k=0) == set(range(6))
    quarters = [0.0] * 4  # mass 1/4 each, exactly
    assert support(quarters, device, top_p=0.5) == {0, 1}
    assert support(quarters, device, top_p=0.5001) == {0, 1, 2}
    assert support(quarters, device, top_p=1e-9) == {0}
    halves = [math.log(4), math.log(2), math.log(1), math.log(1)]  # 1/2, 1/4, 1/8, 1/8
    assert support(halves, device, top_p=0.6) == {0, 1}
    assert support(halves, device, top_p=0.8) == {0, 1, 2}
    assert support(halves, device, top_k=2, top_p=0.6) == {0}  # renormalised: 2/3, 1/3
    assert support(halves, device, top_k=2, top_p=0.7) == {0, 1}
    assert support(halves, device, min_p=0.49) == {0, 1}
    assert support(halves, device, min_p=0.51) == {0}
    assert support([5.0, 5.0, 1.0], device, min_p=0.999) == {0, 1}


def test_filters_follow_the_temperature(device):
    """p = 2/3, 1/3 at temperature 1 and 4/5, 1/5 at 1/2."""
    row = [math.log(2), 0.0]
    assert support(row, device, top_p=0.7) == {0, 1}
    assert support(row, device, top_p=0.7, temperature=0.5) == {0}
    assert support(row, device, min_p=0.4) == {0, 1}
    assert support(row, device, min_p=0.4, temperature=0.5) == {0}


def test_filters_resolve_a_large_tie_by_id(device):
    """70000 equal values: ids alone decide, through every digit of a select."""
    logits = torch.zeros(1, 30, 70000)
    position = torch.arange(30).view(1, 30)
    for filters in [{"top_k": 300}, {"top_p": 299.5 / 70000}]:
        token, _, _ = run(logits, position, device, 4, **filters)
        noise = [gumbel_ref(300, 4, p + 1) for p in range(30)]
        assert token.flatten().tolist() == [int(np.argmax(g)) for g in noise]


def test_filters_that_keep_the_token_do_not_change_it(device, rng):
    """Noise belongs to the id, so filters and neighbours never move it to another token."""
    logits = torch.randn(1, 200, 50, generator=rng)
    position = torch.arange(200).view(1, -1)
    free, _, _ = run(logits, position, device, 8)
    for filters in [{"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}]:
        token, _, _ = run(logits, position, device, 8, **filters)
        for n, (got, want) in enumerate(zip(token[0].tolist(), free[0].tolist(), strict=True)):
            kept = kept_ref(logits[0, n].numpy(), 1.0, **filters)
            assert got in kept
            assert got == want or want not in kept
