"""What a completion says of its rounds: depths offered and accepted, and whose time is whose."""

import time

import pytest
from variants import variant

from kdtree import Engine, OracleConfig, SamplingParams


def engine_of(device, drafter="none", **options) -> Engine:
    where = {"device": str(device), "dtype": "float32", "max_seq_len": 100}
    return Engine(variant("base"), drafter=drafter, max_batch=2, **where, **options)


def depths(parent: list[int]) -> list[int]:
    found = []
    for p in parent:
        found.append(found[p] + 1 if p >= 0 else 0)
    return found


@pytest.mark.parametrize("tree", ["best-first", "chain"])
@pytest.mark.parametrize("accuracy", [0.3, 0.8])
def test_acceptance_by_depth(tree, accuracy, device):
    """Counted again from the rounds' trees: two completions at once, of different lengths."""
    prompts = [[5, 6, 7], [8, 9]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (60, 31)]
    plain = engine_of(device).generate(prompts, params)
    truth = tuple((*p, *r.token_ids) for p, r in zip(prompts, plain, strict=True))
    oracle = OracleConfig(truth, accuracy=accuracy, depth=5)
    engine = engine_of(device, oracle, tree=tree, budget=6)
    for result in engine.generate(prompts, params, trace=True):
        m, trace = result.metrics, result.completions[0].trace
        deepest = [max(depths(round.parent)) for round in trace]
        walked = [len(round.path) - 1 for round in trace]  # but of the last one, which was cut
        assert m.offered == [sum(n > d for n in deepest) for d in range(max(deepest))]
        least = [sum(n > d for n in walked) for d in range(max(deepest))]
        assert all(0 <= a - b <= 1 for a, b in zip(m.accepted, least, strict=True))
        assert m.accepted[: walked[-1]] == least[: walked[-1]]
        rates = [a / n for a, n in zip(m.accepted, m.offered, strict=True)]
        assert m.acceptance_by_depth == rates and all(0 <= rate <= 1 for rate in rates)
        assert 0 < sum(m.accepted) < sum(m.offered)


def test_plain_decoding_offers_nothing(device):
    got = engine_of(device).generate([5, 6], SamplingParams(max_tokens=4))
    assert got.metrics.offered == got.metrics.acceptance_by_depth == []


def test_another_s_prompt_is_no_part_of_decoding(device, monkeypatch):
    engine, seconds = engine_of(device), 0.4
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 3, 3)]
    engine.generate([[5, 6]] * 3, params)  # what happens only once
    monkeypatch.setattr(engine.drafter, "start", lambda *arguments: time.sleep(seconds))
    first, second, third = (r.metrics for r in engine.generate([[5, 6]] * 3, params))
    for m in (first, second, third):
        assert seconds <= m.prefill_s < 2 * seconds and m.decode_s < seconds
    assert first.ttft_s > 2 * seconds > third.ttft_s  # the second prompt came before its token


def test_a_known_run(device):
    truth = engine_of(device).generate([1, 2, 3], SamplingParams(max_tokens=33, ignore_eos=True))
    drafter = OracleConfig(((1, 2, 3, *truth.token_ids),), depth=7)
    engine = engine_of(device, drafter, budget=7)
    got = engine.generate([1, 2, 3], SamplingParams(max_tokens=33, ignore_eos=True), trace=True)
    m = got.metrics
    assert (m.prompt_tokens, m.tokens, m.rounds) == (3, 33, 5)
    assert m.histogram == [0, 1, 0, 0, 0, 0, 0, 0, 4]
    assert m.acceptance_length == 33 / 5
    assert set(m.phases) == {"draft", "forward", "verify", "commit"}
    assert all(seconds > 0 for seconds in (*m.phases.values(), m.ttft_s, m.decode_s))
    assert (m.offered, m.accepted[0] in (4, 5), m.accepted[6]) == ([5] * 7, True, 4)
    trace = got.completions[0].trace
    assert [len(r.emitted) for r in trace] == [8, 8, 8, 8, 1]
    assert trace[0].emitted == truth.token_ids[:8]
    assert trace[0].path == list(range(8)) and trace[0].parent == list(range(-1, 7))
