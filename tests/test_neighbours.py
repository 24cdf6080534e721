"""A request's outcome does not depend on what else is in its batch."""

import functools
from dataclasses import replace

import pytest
from demo_engine import (
    CODE,
    LISTING,
    STORY,
    alone,
    engine_of_kind,
    outcome,
    truth_of,
)

from kdtree import SamplingParams


@functools.cache
def mix(device) -> list[tuple[str, SamplingParams]]:
    """Requests that have little in common, and end in different ways."""
    greedy, sampled = SamplingParams(max_tokens=12), SamplingParams(max_tokens=9, temperature=1.0)
    early = alone(device, CODE, greedy).token_ids[2:4], alone(device, CODE, sampled).token_ids[:2]
    return [
        (LISTING, replace(greedy, stop="── a", max_tokens=20)),
        (STORY, replace(sampled, seed=3, logprobs=5)),
        (CODE, replace(greedy, min_tokens=6, stop_token_ids=tuple(early[0]), logprobs=0)),
        ("\n", replace(sampled, temperature=1.5, top_p=0.9, max_tokens=1)),
        (CODE, replace(sampled, min_tokens=4, stop_token_ids=tuple(early[1]), logprobs=64)),
        (STORY, replace(sampled, n=2, seed=8, max_tokens=7, logprobs=1)),
        (LISTING, replace(sampled, min_p=0.05, stop=("\n", "zz"), max_tokens=16, logprobs=2)),
        (CODE, replace(greedy, min_tokens=1, stop_token_ids=tuple(early[0]))),
    ]


GROUPS = [(0, 2), (7, 2), (6, 5), (1, 4, 6), (2, 0, 3), (6, 4, 2, 7, 0), (3, 5, 1, 4, 2)]


@pytest.mark.parametrize("kind", ["none", "noisy", "ngram"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_neighbours_change_nothing(group, kind, device):
    requests = [mix(device)[i] for i in group]
    want = [alone(device, *request) for request in requests]
    for batch in (1, 2, 3):
        engine = engine_of_kind(kind, device, truth_of(*want), batch)
        prompts, params = zip(*requests, strict=True)
        got = engine.generate(list(prompts), list(params))
        for i, a, b in zip(group, got, want, strict=True):
            assert outcome(a) == outcome(b), (i, batch)


def test_the_mix_is_one(device):
    """The requests above stop for every reason, and their masks and limits matter."""
    results = [alone(device, *request) for request in mix(device)]
    reasons = [c.finish_reason for r in results for c in r.completions]
    assert {"stop", "length"} <= set(reasons)
    kinds = {type(c.stop_reason) for r in results for c in r.completions}
    assert {str, type(None)} <= kinds
    for i in (2, 4):
        prompt, params = mix(device)[i]
        early = alone(device, prompt, replace(params, min_tokens=0))
        assert len(early.token_ids) < params.min_tokens
