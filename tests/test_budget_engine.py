"""The automatic budget in the loop: what the drafter hears of, and the clock."""

import pytest
import torch
from dflash_watched import Watched
from simulated import TABLES, Drafting, Simulation, fixed
from test_budget import SKILLS
from test_engine import engine_of, outcome

from kdtree import Costs, DflashConfig, SamplingParams, budget, policy
from kdtree.budget import AutoBudget, Held
from kdtree.drafters import NoneConfig
from kdtree.tree import Path

TABLE = {n: 1.0 + 0.05 * n for n in (1, 2, 4, 8, 16)}
PARAMS = [SamplingParams(max_tokens=n, seed=n, temperature=t, ignore_eos=True)
          for n, t in ((90, 0.0), (20, 1.0), (50, 1.0), (9, 0.0))]  # fmt: skip
PROMPTS = [[5, 6, 7], [8] * 30, [9, 1], list(range(20, 60))]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["dflash", "dflash-window", "dflash2"])
def test_the_drafter_hears_of_rounds_without_a_draft(name, batch, device, monkeypatch):
    """Its cache holds what is committed, in order, whenever it is asked (the watcher looks), and
    gives the blocks that it gives where it hears of every round at once."""
    monkeypatch.setattr(policy, "RISK", 1.0)
    monkeypatch.setattr(budget, "HELD", 5)
    told, at_once = Watched(DflashConfig()), Watched(DflashConfig(), NoneConfig())
    engine = engine_of(name, device, "float32", told, batch, budget=Costs(TABLE, 9.0))
    got = engine.generate(PROMPTS, PARAMS)
    assert engine.drafter.chosen[1] > 60 and len(told.made[0].rounds) > 12
    other = engine_of(name, device, "float32", at_once, batch)
    assert outcome(other.generate(PROMPTS, PARAMS)) == outcome(got)
    for request in range(len(PROMPTS)):
        want = at_once.made[0].by_length(request)
        for length, blocks in told.made[0].by_length(request).items():
            torch.testing.assert_close(blocks, want[length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inside", [True, False])
def test_calls_in_and_out_of_inference_mode(inside, device):
    """What a call leaves behind is written by the next, whatever mode either is in."""
    engine = engine_of("base", device, "float32", "ngram", budget=Costs({1: 1.0, 8: 1.05}, 0.01))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = []
    for mode in (inside, not inside, inside):
        with torch.inference_mode(mode):
            texts.append(engine.generate([5, 6, 7] * 3, params).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_joins_paths_of_one_node(device):
    """The second sequence ended before the third round."""

    def path(*rows):
        token = torch.tensor([[t] for t, _ in rows], device=device)
        length = torch.tensor([n for _, n in rows], dtype=torch.int32, device=device)
        return Path(length[:, None] - 1, length, token, token.float(), length < 0)

    held = Held()
    for _ in range(2):  # what was before is no part of it
        held.clear()
        for each in path((5, 1), (7, 1)), path((6, 1), (8, 1)), path((9, 1), (0, 0)):
            held.rounds += 1
            held.add(each, each.logprob[..., None])
    got, taps = held.joined()
    assert taps.tolist() == [[[5.0], [6.0], [9.0]], [[7.0], [8.0], [0.0]]]
    assert got.node.tolist() == [[0, 1, 2], [0, 1, -1]] and got.node.dtype == torch.int32
    assert got.length.tolist() == [3, 2] and got.length.dtype == torch.int32
    assert got.token.tolist() == [[5, 6, 9], [7, 8, 0]] == got.logprob.tolist()


class Clock(Simulation):
    """Now and then a round seems to take much more."""

    def seen(self, seconds):
        return seconds * (9 if float(torch.rand(1, generator=self.rng)) < 0.05 else 1)


@pytest.mark.parametrize("cheap", [0.75, 1.0, 1.4])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("skill", SKILLS)
def test_finds_out_what_rounds_take(skill, table, cheap):
    """The machine is ten times as fast as it was told, and rounds with a draft are told to be
    cheaper, or dearer, than they are. Over twelve texts of about 128 tokens."""
    skill, costs = SKILLS[skill], TABLES[table]
    draft = 0.4 * costs[1]
    told = {n: 10 * each * (cheap if n > 1 else 1) for n, each in costs.items()}
    drafter = Drafting(skill, 64, False)
    run = Clock(AutoBudget(drafter, Costs(told, 10 * draft * cheap), timed=True), costs, draft)
    for text in range(1, 13):
        run.drafter.start(0, 0, [1])
        while run.tokens < 128 * text:
            run.run(1, skill)
    chain = fixed(skill, costs, draft, 8, chain=True).run(600, skill).speed
    assert run.speed > 0.96 * max(1 / costs[1], chain)
