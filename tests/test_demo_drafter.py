"""The drafter that ships: its scores are those of its files, and its drafts are as good as said."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file
from sample_reference import gumbel_ref

from kdtree import DflashConfig, Engine, SamplingParams
from kdtree.drafters.dflash import drafter as module
from kdtree.errors import ConfigError
from kdtree.options import DEMO

PROMPTS = [
    "class Cache:\n    def __init__(self, size):\n        self.size = size\n",
    "def read_lines(path, encoding='utf-8'):\n",
    "To install the package, run the following command in a terminal. If you want to",
    "The server listens on the port that is given in the configuration file. When a",
]


def engine_of(device, **options):
    """Without graphs, which would not know what a test watches."""
    where = {"device": str(device), "dtype": "float32", "max_seq_len": 300, "cuda_graphs": False}
    return Engine(drafter=DflashConfig(**options), budget=7, **where)


def softmax(x, axis):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_scores_are_those_of_the_files(temperature, device, monkeypatch):
    """A round's candidates and edge scores, from the checkpoint's tensors in float64."""
    engine, seen = engine_of(device), []
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=11, ignore_eos=True)
    whole, drafted, plain = module.grow, [], engine.drafter.draft

    def grow(state, score, candidate, *rest):
        seen.append((score, candidate))
        return whole(state, score, candidate, *rest)

    def draft(state):
        drafted.append((*plain(state), state.length.clone(), state.root().clone()))
        return drafted[-1][:2]

    monkeypatch.setattr(module, "grow", grow)
    monkeypatch.setattr(engine.drafter, "draft", draft)
    engine.generate(PROMPTS[0], params)
    files = DEMO / "drafter"
    fitted = json.loads((files / "config.json").read_text())["kdtree_scores"]
    w = {name: x.double().numpy() for name, x in load_file(files / "model.safetensors").items()
         if name.startswith("candidate_selector")}  # fmt: skip
    assert len(drafted) == len(seen) >= 3
    for (hidden, logits, length, root), (score, candidate) in zip(drafted, seen, strict=True):
        candidate, got = candidate[0].cpu().numpy(), score[0].exp().double().cpu().numpy()
        q = np.log(softmax(logits[0].double().cpu().numpy(), -1))
        h = hidden[0].double().cpu().numpy() @ w["candidate_selector.hidden_projection.weight"].T
        before = np.full(candidate.shape[1], int(root))
        for j in range(len(q)):
            a, b, c, s = (fitted[name][j] for name in ("a", "b", "c", "selector"))
            x = a * q[j]
            if temperature:
                noise = gumbel_ref(q.shape[1], 11, int(length) + j)
                x = x + b * temperature * noise.astype(np.float64)
            x = x / (1 + c * temperature)
            best = np.argsort(-x, kind="stable")[: candidate.shape[1]]
            assert candidate[j].tolist() == best.tolist()
            start = w["candidate_selector.predecessor_codebook"][before] * h[j]
            edge = start @ w["candidate_selector.successor_codebook"][best].T
            mass = softmax(x, -1)[best].sum()
            want = mass * softmax(x[best] + s * a * edge / (1 + c * temperature), -1)
            rows = slice(0, 1) if j == 0 else slice(None)
            np.testing.assert_allclose(got[j][rows], want[rows], rtol=2e-3, atol=1e-6)
            before = best


@pytest.mark.parametrize("temperature, least", [(0.0, 3.2), (1.0, 2.0)])
def test_drafts_are_worth_what_is_said(temperature, least, device):
    """Tokens a round; docs/acceptance.md has 4.0 and 2.4 over many more prompts."""
    params = SamplingParams(max_tokens=96, temperature=temperature, seed=3, ignore_eos=True)
    metrics = [result.metrics for result in engine_of(device).generate(PROMPTS, params)]
    assert sum(m.tokens for m in metrics) / sum(m.rounds for m in metrics) > least


def test_a_budget_of_nothing_is_plain_decoding(device):
    engine = Engine(drafter="dflash", budget=0, device=str(device), max_seq_len=100)
    assert engine.drafter.taps == () and engine.drafter.nodes == 1


@pytest.mark.parametrize("options", [{"bigram": "x"}, {"scores": {"bigram": [1.0] * 7}}])
def test_a_table_and_its_weight_go_together(options):
    with pytest.raises(ConfigError, match="wants a table and a weight that is not 0"):
        engine_of("cpu", **options)


@pytest.mark.parametrize("scores", ["abc", 5, {1: [1.0] * 7}])
def test_scores_are_lists_by_name(scores):
    with pytest.raises(TypeError, match="scores is .*, wants lists by name"):
        engine_of("cpu", scores=scores)


@pytest.mark.parametrize("name, value", [("a", -0.5), ("c", -1.0)])
def test_scores_that_would_turn_the_order_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"kdtree_scores.{name} holds {value}, wants 0 or more"):
        engine_of("cpu", scores={name: [value] * 7})
