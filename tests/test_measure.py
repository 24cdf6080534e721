"""The costs that the automatic budget measures at start."""

import time
from math import inf

import pytest
from simulated import Drafting, Skill
from test_engine import engine_of, outcome
from variants import variant

from kdtree import Engine, NgramConfig, SamplingParams
from kdtree import measure as measuring
from kdtree.costs import sizes_up_to
from kdtree.measure import measure


def test_a_slow_draft_is_seen(device, monkeypatch):
    engine = engine_of("base", device, "float32", "ngram", budget=7)
    propose = engine.drafter.propose

    def slowly(state):
        time.sleep(0.2)
        return propose(state)

    monkeypatch.setattr(engine.drafter, "propose", slowly)
    costs, _ = measure(engine.model, engine.cache, engine.state, engine.drafter, False)
    usual = costs.rounds[min(costs.rounds, key=lambda size: abs(size - 8))]
    assert costs.draft + usual >= 0.2  # a whole round with a draft; each alone is a difference


def test_costs_are_kept_where_alike_rounds_take_alike(device, monkeypatch):
    """Every second draft waits longer: the whole rounds are not alike, whatever the trees' are."""
    engine, drafts = engine_of("base", device, "float32", "ngram", budget=7), []
    propose = engine.drafter.propose

    def by_turns(state):
        drafts.append(time.sleep(0.5 if len(drafts) % 2 else 0.1))
        return propose(state)

    monkeypatch.setattr(engine.drafter, "propose", by_turns)
    assert not measure(engine.model, engine.cache, engine.state, engine.drafter, False)[1]


def test_costs_are_kept_where_enough_times_were_taken(device, monkeypatch):
    engine = engine_of("base", device, "float32", "ngram", budget=7)
    monkeypatch.setattr(measuring, "CALM", inf)
    monkeypatch.setattr(measuring._Rounds, "in_turns", lambda *_: ([1.0] * 3, [1e6] * 3))

    def kept() -> bool:
        return measure(engine.model, engine.cache, engine.state, engine.drafter, False)[1]

    assert kept()
    monkeypatch.setattr(measuring, "TREE_SECONDS", 0.0)  # one of each size
    assert not kept()


def test_measures_its_costs(device):
    began = time.perf_counter()
    drafter = NgramConfig(budget=40)
    engine = engine_of("base", device, "float32", drafter, batch=2, budget="auto")
    assert time.perf_counter() - began < 120  # 2 s, on a machine with nothing else to do
    rounds = engine.drafter.costs.rounds
    assert list(rounds) == [1, 2, 4, 8, 12, 16, 24, 32, 41]
    assert all(0 < seconds < 1 for seconds in rounds.values())
    assert 0 <= engine.drafter.costs.draft < 1
    assert engine.drafter.nodes == engine.drafter.drafter.nodes == 41
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    got = engine.generate([[1, 2, 3], [4, 5]], params)
    want = engine_of("base", device, "float32").generate([[1, 2, 3], [4, 5]], params)
    assert outcome(got) == outcome(want)


def test_times_full_trees_after_one_context(device):
    """What is timed is what the size says: no padding, and not further on with every round."""
    engine, seen = engine_of("base", device, "float32", batch=2), {}

    class Watched:
        config, logits = engine.model.config, engine.model.logits

        def __call__(self, step, cache, taps):
            if step.token.shape[1] > 1:
                size, apart = step.token.shape[1], step.token[0].tolist() != step.token[1].tolist()
                seen.setdefault(step.context.tolist()[0], {})[size] = apart
                assert (step.position >= 0).all()
            return engine.model(step, cache, taps)

    drafter = Drafting(Skill(0.5), 64, False, 2).to(device)
    measure(Watched(), engine.cache, engine.state, drafter, False)
    # Those of 8 are with a draft.
    [timed] = [sizes for sizes in seen.values() if list(sizes) != [8]]
    assert set(timed) == set(sizes_up_to(64)) - {1} and all(timed.values())
    assert 0 not in seen


@pytest.mark.parametrize("length", [2, 3, 7, 20])
def test_measures_in_a_short_context(length, device):
    engine = Engine(variant("base"), drafter="ngram", device=str(device), max_seq_len=length)
    assert set(engine.drafter.costs.rounds) == {1, 2, 4, 8}
    assert engine.cache.context.tolist() == [0]
