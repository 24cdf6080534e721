"""The automatic budget in the loop: what the drafter hears of."""

import pytest
import torch
from dflash_watched import Watched
from test_engine import engine_of, outcome

from kdtree import Costs, DflashConfig, SamplingParams, budget, policy
from kdtree.budget import joined
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


def test_joins_paths_of_one_node():
    """The second sequence ended before the third round."""

    def path(*rows):
        token = torch.tensor([[t] for t, _ in rows])
        length = torch.tensor([n for _, n in rows], dtype=torch.int32)
        return Path(length[:, None] - 1, length, token, token.float(), length < 0)

    got = joined([path((5, 1), (7, 1)), path((6, 1), (8, 1)), path((9, 1), (0, 0))])
    assert got.node.tolist() == [[0, 1, 2], [0, 1, -1]] and got.node.dtype == torch.int32
    assert got.length.tolist() == [3, 2] and got.length.dtype == torch.int32
    assert got.token.tolist() == [[5, 6, 9], [7, 8, 0]] == got.logprob.tolist()
