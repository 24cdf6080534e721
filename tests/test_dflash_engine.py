"""The loop with a DFlash drafter: the same tokens as without, whatever it proposes."""

from dataclasses import replace

import pytest
import torch
from test_engine import Case, engine_of, outcome, shuffle_pages
from variants import golden, variant

from kdtree import SamplingParams
from kdtree.config import read_json

NAMES = ["dflash", "dflash-int4", "dflash-window", "dflash-yarn", "dflash2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", range(15))
def test_trees_return_what_autoregression_returns(number, dtype, device):
    case, name = Case(number), NAMES[number % len(NAMES)]
    want = engine_of(name, device, dtype).generate(case.prompts, case.params)
    for tree in ("best-first", "chain"):
        engine = engine_of(name, device, dtype, "dflash", case.batch, budget=case.budget, tree=tree,
                           chain_seed=case.rng.random() < 0.5)  # fmt: skip
        engine.drafter.cache.data.fill_(float("nan"))
        shuffle_pages(engine, case.rng)
        assert outcome(engine.generate(case.prompts, case.params)) == outcome(want), tree


@pytest.mark.parametrize("name", NAMES)
def test_ends_of_the_context(name, device):
    """Blocks that reach beyond it, and more rounds than a window has rows."""
    engine = engine_of(name, device, "float32", "dflash", budget=15)
    for length in (140, 185, 198, 199):
        got = engine.generate([3] * length, SamplingParams(ignore_eos=True))
        assert len(got.token_ids) == 200 - length


def helped(drafter, truth: torch.Tensor) -> None:
    """Raises the true tokens' logits, by much or by little as their positions have it."""
    draft = drafter.draft

    def draft_better(state):
        hidden, logits = draft(state)
        position = state.length[:, None] + torch.arange(logits.shape[1], device=logits.device)
        true = truth[position.clamp(max=len(truth) - 1).long()][..., None]
        more = torch.where(position * 7 % 10 < 7, 12.0, 5.0)[..., None]
        return hidden, logits.scatter_add(2, true, more)

    drafter.draft = draft_better


@pytest.mark.parametrize("text", ["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_seeded_tree_accepts_no_less_than_its_chain(name, text, device):
    """Round by round: after the same tokens, with a budget of at least the block's depth."""
    want = golden(name)
    tokens = want["prompt.ids"].tolist() + want[f"{text}.ids"].tolist()
    truth = torch.tensor(tokens, device=device)
    params = SamplingParams(max_tokens=17, ignore_eos=True)
    if text == "sampled":
        params = replace(params, temperature=1.0, seed=int(want["metadata"]["sample_seed"]))

    def first_rounds(tree: str, more: int) -> list[int]:
        """Tokens accepted after each beginning of the text."""
        block = read_json(variant(name) / "drafter/config.json")
        depth = (block.get("block_size") or block["dflash_config"]["block_size"]) - 1
        engine = engine_of(name, device, "float32", "dflash", 4, budget=depth + more, tree=tree,
                           chain_seed=True)  # fmt: skip
        helped(engine.drafter, truth)
        results = engine.generate([tokens[:n] for n in range(24, 72, 3)], params, trace=True)
        return [len(r.completions[0].trace[0].emitted) for r in results]

    chain, trees = first_rounds("chain", 0), [first_rounds("best-first", n) for n in (0, 1, 9, 30)]
    assert sum(chain) > 1.5 * len(chain) and max(chain) > min(chain)
    for rounds in trees:
        assert all(n >= m for n, m in zip(rounds, chain, strict=True))
    assert sum(trees[-1]) > sum(chain)
