"""The DFlash drafter against the oracle: every block of a generation, whatever path led to it."""

import pytest
import torch
from dflash_watched import Watched
from model_run import assert_near
from tolerance import model_limit
from variants import golden, names, variant

from kdtree import DflashConfig, Engine, OracleConfig, SamplingParams

DRAFTERS = names(drafters=True)
TEXTS = ("greedy", "sampled")


def params_of(name: str) -> list[SamplingParams]:
    """Of the two continuations that the oracle knows."""
    seed = int(golden(name)["metadata"]["sample_seed"])
    greedy = SamplingParams(max_tokens=64, ignore_eos=True)
    return [greedy, SamplingParams(max_tokens=64, ignore_eos=True, temperature=1.0, seed=seed)]


def generate(name, device, dtype, batch=2, accuracy=0.7, config=None, **options):
    """Both texts, by trees that are right now and then; returns the watcher."""
    want = golden(name)
    prompt = want["prompt.ids"].tolist()
    truth = tuple(tuple(prompt + want[f"{text}.ids"].tolist()) for text in TEXTS)
    watched = Watched(config or DflashConfig(), OracleConfig(truth, accuracy, 3, 6, budget=11))
    engine = Engine(variant(name), drafter=watched, device=str(device), dtype=dtype,
                    max_batch=batch, max_seq_len=100, **options)  # fmt: skip
    for rows in (*watched.made[0].drafter.cache._k, *watched.made[0].drafter.cache._v):
        rows.fill_(float("nan"))  # what is read without having been written shows
    got = engine.generate([prompt, prompt], params_of(name))
    if dtype == "float32":
        assert [tuple(r.prompt_token_ids + r.token_ids) for r in got] == list(truth)
        assert all(len(r.metrics.histogram) > 3 for r in got), "paths of several lengths"
    return watched.made[0]


def compare(name: str, watcher, dtype: torch.dtype, texts=TEXTS) -> int:
    """The blocks against the oracle's; returns how many."""
    want = golden(name, "drafter")
    first = len(golden(name)["prompt.ids"]) - 1
    layers = watcher.drafter.setup.target.layers + len(watcher.drafter.model.layers)
    limit, blocks = model_limit(dtype, layers), 0
    for request, text in enumerate(texts):
        for length, (hidden, logits) in watcher.by_length(request).items():
            at = length - first
            assert_near(
                f"{text} {length} hidden", hidden.numpy(), want[f"{text}.hidden"][at], limit
            )
            assert_near(
                f"{text} {length} logits", logits.numpy(), want[f"{text}.logits"][at], limit
            )
            blocks += 1
    return blocks


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DRAFTERS)
def test_blocks_match_float64(name, batch, device):
    watcher = generate(name, device, "float32", batch)
    assert compare(name, watcher, torch.float32) > 30
