"""Scores and edges: the form against float64, the coupling with the draw, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sample_reference import gumbel_ref
from says import says
from scored import HIDDEN, ScoredConfig, edges_of
from test_engine import engine_of, outcome

from kdtree import CapacityError, CheckpointError, ConfigError, SamplingParams
from kdtree.cache import KvCache
from kdtree.drafters.base import Stateless, grow, nodes_of
from kdtree.drafters.edges import Bigram
from kdtree.drafters.scores import Scorer, ScoresConfig
from kdtree.state import State
from kdtree.tree import TokenTree

VOCAB, J, M = 60, 5, 7
FITTED = {
    "a": [1.4, 1.3, 1.2, 1.1, 1.0],
    "b": [1.0, 0.9, 0.8, 0.7, 0.6],
    "c": [0.0, 0.1, 0.2, 0.3, 0.4],
    "selector": [0.5, 0.4, 0.3, 0.2, 0.1],
    "bigram": [0.0, 0.9, 0.8, 0.7, 0.6],
}
DEPTHS = ScoresConfig.from_hf(FITTED, J)


def state_of(device, temperatures=(0.0, 1.0, 0.6)) -> State:
    state = State(len(temperatures), 64, device)
    for b, t in enumerate(temperatures):
        params = SamplingParams(temperature=t, seed=b - 1)
        state.start(b, [3 + b] * (b + 2), params, [])
    return state


def drafted(rng, sequences=3):
    logits = torch.randn(sequences, J, VOCAB, generator=rng) * 3
    return logits, torch.randn(sequences, J, HIDDEN, generator=rng)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def scores_ref(config, logits, hidden, state, candidate, selector=None, bigram=None):
    """The edge scores [B, J, M, M] of these candidates, one number at a time, float64."""
    logits, hidden = logits.double().numpy(), hidden.double().numpy()
    B, out = len(logits), np.zeros((len(logits), J, M, M))
    for i in range(B):
        t, seed = float(state.sampling.temperature[i]), int(state.sampling.seed[i])
        length = int(state.length[i])
        for j in range(J):
            a, b, c = (v[j] for v in (config.a, config.b, config.c))
            q = log_softmax(logits[i, j])
            noise = t * gumbel_ref(VOCAB, seed, length + j) if t else 0
            y = (a * q + b * noise) / (1 + c * t)
            score = log_softmax(y)[candidate[i, j]]
            before = candidate[i, j - 1] if j else [int(state.root()[i])] * M
            odds = log_softmax(logits[i, j - 1][before]) if j else np.full(M, -np.log(M))
            pair = bigram[before][:, candidate[i, j]] if bigram is not None else 0
            mean = (
                np.log((np.exp(odds)[:, None] * np.exp(pair)).sum(0)) if bigram is not None else 0
            )
            for m in range(M):
                edge = np.zeros(M)
                if selector is not None:
                    P, A, C = selector
                    edge += (
                        config.selector[j]
                        * C[candidate[i, j]]
                        @ (A[before[m]] * (P @ hidden[i, j]))
                    )
                if bigram is not None:
                    edge += config.bigram[j] * (pair[m] - mean)
                moved = score + a * edge / (1 + c * t)
                out[i, j, m] = log_softmax(moved) + np.log(np.exp(score).sum())
    return out


@pytest.mark.parametrize("kinds", [(), ("selector",), ("bigram",), ("selector", "bigram")])
def test_matches_float64(kinds, device, rng):
    logits, hidden = drafted(rng)
    selector, bigram = edges_of(VOCAB, device)
    edges = {k: e for k, e in (("selector", selector), ("bigram", bigram)) if k in kinds}
    scorer, state = Scorer(DEPTHS, M, device, **edges), state_of(device)
    score, candidate = scorer(logits.to(device), hidden.to(device), state)
    score, candidate = score.double().cpu().numpy(), candidate.cpu().numpy()
    matrices = (selector.projection, selector.predecessor, selector.successor)
    want = scores_ref(
        DEPTHS, logits, hidden, state, candidate,
        [x.double().cpu().numpy() for x in matrices] if "selector" in kinds else None,
        bigram.logprob.double().cpu().numpy() if "bigram" in kinds else None,
    )  # fmt: skip
    if not kinds:
        assert score.shape == (3, J, M)
        want = want[:, :, 0]
    np.testing.assert_allclose(score, want, rtol=2e-6, atol=2e-5)


def test_edges_keep_the_mass_of_a_depth(device, rng):
    logits, hidden = (x.to(device) for x in drafted(rng))
    state = state_of(device)
    plain, candidate = Scorer(DEPTHS, M, device)(logits, hidden, state)
    moved, same = Scorer(DEPTHS, M, device, *edges_of(VOCAB, device))(logits, hidden, state)
    assert torch.equal(candidate, same)
    mass = plain.exp().sum(-1, keepdim=True).expand(-1, -1, M)
    torch.testing.assert_close(moved.exp().sum(-1), mass)
    assert not torch.allclose(moved[:, :, 0], plain, atol=0.01)


def test_greedy_scores_are_sharpened_log_probabilities(device, rng):
    logits, hidden = (x.to(device) for x in drafted(rng))
    got, candidate = Scorer(DEPTHS, M, device)(logits, hidden, state_of(device, (0.0,) * 3))
    a = torch.tensor(FITTED["a"], device=device)[:, None]
    want, ids = (a * logits.log_softmax(-1)).log_softmax(-1).topk(M)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(candidate, ids)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("edges", [False, True])
def test_spoilt_logits_are_no_candidates(bad, edges, device, rng):
    logits, hidden = drafted(rng)
    logits[0, 2] = bad
    scorer = Scorer(DEPTHS, M, device, *(edges_of(VOCAB, device) if edges else ()))
    score, candidate = scorer(logits.to(device), hidden.to(device), state_of(device))
    assert (score[0, 2] == -float("inf")).all()
    assert score[1:].isfinite().all() and not score.isnan().any()
    assert candidate.min() >= 0 and candidate.max() < VOCAB


PARTS = {  # what says that a part is not there
    "coupling": {"b": (0.0,) * J, "c": (0.0,) * J},
    "edges": {"selector": (0.0,) * J, "bigram": (0.0,) * J},
    "sharpening": {"a": (1.0,) * J, "b": (1.0,) * J, "c": (0.0,) * J},
}


def test_what_is_switched_off_is_off(device, rng):
    logits, hidden = (x.to(device) for x in drafted(rng))
    edges, state = edges_of(VOCAB, device), state_of(device)

    def scores(*without):
        config = DEPTHS
        for part in without:
            config = replace(config, **PARTS[part])
        return Scorer(config, M, device, *edges)(logits, hidden, state)

    off, candidate = scores("sharpening", "coupling", "edges")
    want, ids = logits.log_softmax(-1).topk(M)
    torch.testing.assert_close(off, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(candidate, ids)
    assert scores("edges")[0].shape == (3, J, M) and scores()[0].shape == (3, J, M, M)
    a = torch.tensor(FITTED["a"], device=device)[:, None]
    uncoupled, _ = scores("coupling", "edges")
    want, _ = (a * logits.log_softmax(-1)).log_softmax(-1).topk(M)
    torch.testing.assert_close(uncoupled, want, rtol=1e-5, atol=1e-5)
    unfitted, _ = scores("edges", "sharpening")
    torch.testing.assert_close(unfitted[0], off[0], rtol=1e-5, atol=1e-5)  # it is greedy
    assert not torch.allclose(unfitted[1:], off[1:], atol=0.1)


class Knowing(Stateless):
    """Drafts with the target's own logits at every depth: the coupled draft is the draw itself."""

    def __init__(self, setup, logits):
        self.setup, self.known, self.nodes = setup, logits, nodes_of(setup, 9, 9)
        self.scorer = Scorer(ScoresConfig.from_hf(None, 9), 3, setup.device)

    def propose(self, state):
        at = state.length[:, None].long() - 1 + torch.arange(9, device=state.length.device)
        logits = self.known[at.clamp(max=len(self.known) - 1)]
        return grow(state, *self.scorer(logits, None, state), self.nodes, self.setup)


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.7])
def test_a_drafter_that_knows_the_target_is_always_right(temperature, device):
    """Seed, position, temperature and id of the noise are the draw's: rank 1 is the token."""
    params = SamplingParams(max_tokens=101, temperature=temperature, seed=11, ignore_eos=True)
    prompt = [5, 9, 2, 77, 31]
    plain = engine_of("base", device, "float32")
    want = plain.generate(prompt, params)
    truth = torch.tensor([prompt + want.token_ids], device=device)

    def known():
        mla = plain.config.mla
        cache = KvCache(
            plain.config.layers, mla.kv_lora_rank + mla.rope, 1, 200,
            device=device, dtype=torch.float32,
        )  # fmt: skip
        with torch.no_grad():
            hidden, _ = plain.model(cache.place(TokenTree.chain(truth)), cache)
            return plain.model.logits(hidden)[0]

    class Config:
        def create(self, setup):
            return Knowing(setup, known())

    engine = engine_of("base", device, "float32", Config(), tree="chain", budget=9)
    got = engine.generate(prompt, params)
    assert outcome([got]) == outcome([want])
    assert got.metrics.histogram == [0, 1, *[0] * 8, 10]


@pytest.mark.parametrize("edges", [False, True])
def test_coupling_helps_a_drafter_that_knows_a_little(edges, device):
    """More tokens a round at temperature 1 with the target's noise than without, outputs alike."""
    params = SamplingParams(max_tokens=80, temperature=1.5, seed=4, ignore_eos=True)
    want = engine_of("base", device, "float32").generate([1, 2, 3], params)
    truth = (tuple([1, 2, 3] + want.token_ids),)
    rounds = {}
    for coupled in (1.0, 0.0):
        drafter = ScoredConfig(truth, lead=4.0, edges=edges, fitted={"b": [coupled] * 7})
        got = engine_of("base", device, "float32", drafter, budget=15).generate([1, 2, 3], params)
        assert outcome([got]) == outcome([want])
        rounds[coupled] = got.metrics.rounds
    assert rounds[1.0] < rounds[0.0]


def test_published_configs_are_untouched():
    assert ScoresConfig.from_hf(None, 3) == ScoresConfig(
        a=(1, 1, 1), b=(1, 1, 1), c=(0, 0, 0), selector=(1, 1, 1), bigram=(0, 0, 0)
    )
    assert ScoresConfig.from_hf({"a": [2, 3], "c": None}, 2).a == (2.0, 3.0)


@pytest.mark.parametrize(
    "given, message",
    [
        ([1], ["kdtree_scores is [1], wants an object"]),
        ({"d": [1]}, ["kdtree_scores has d, supported: a, b, c, selector, bigram"]),
        ({"a": [1, 2]}, ["kdtree_scores.a is [1, 2], wants a list of 3 numbers"]),
        ({"b": 1.0}, ["kdtree_scores.b is 1.0, wants a list of 3 numbers"]),
        ({"c": [0, 1, float("nan")]}, ["kdtree_scores.c holds nan, wants finite numbers"]),
        ({"bigram": [0, 1, True]}, ["kdtree_scores.bigram holds True, wants finite numbers"]),
        ({"selector": [0, 1, 1e39]}, ["kdtree_scores.selector holds 1e+39"]),
    ],
)
def test_refuses_numbers_that_are_none(given, message):
    with says(ConfigError, *message):
        ScoresConfig.from_hf(given, 3)


def test_bigram_table_from_a_file(tmp_path, device):
    table = torch.randn(5, 5).log_softmax(1).half()
    save_file({"logprob": table}, tmp_path / "table.safetensors")
    assert torch.equal(Bigram.load(tmp_path / "table.safetensors", 5, device).logprob.cpu(), table)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"other": torch.zeros(5, 5)}, ["holds ['other'], wants the one tensor 'logprob'"]),
        ({"logprob": torch.zeros(5, 4)}, ["logprob has shape [5, 4], wants [5, 5]"]),
        ({"logprob": torch.zeros(5, 5).int()}, ["logprob has dtype torch.int32"]),
        ({"logprob": torch.full((5, 5), -float("inf"))}, ["logprob is not finite"]),
    ],
)
def test_refuses_other_tables(tensors, message, tmp_path, device):
    save_file(tensors, tmp_path / "table.safetensors")
    with says(CheckpointError, "table.safetensors", *message):
        Bigram.load(tmp_path / "table.safetensors", 5, device)


def test_refuses_a_table_of_a_large_vocabulary(tmp_path, device):
    with says(CapacityError, "163840 tokens takes 50.0 GiB", "at most 16384 tokens"):
        Bigram.load(tmp_path / "none", 163840, device)
    with says(CheckpointError, "none is no bigram table"):
        Bigram.load(tmp_path / "none", 5, device)
