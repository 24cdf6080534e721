"""The model against the oracle, variant by variant: streams, routing, logits, continuations.

Where a decision (an expert, a token) hangs on less than the run's own error, the oracle's choice
and ours may differ and both be right; everywhere else they must agree. A row whose experts differ
is no longer compared, nor what attends to it.
"""

import numpy as np
import pytest
import torch
from tolerance import model_limit
from variants import golden, names, variant

from kdtree import Engine, SamplingParams, ops
from kdtree.cache import KvCache
from kdtree.layers import Moe
from kdtree.models import load_model
from kdtree.tree import TokenTree

DTYPES = ["float32", "bfloat16"]
POISON = float("nan")


def float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


class Run:
    """One forward of known tokens, everything watched."""

    def __init__(self, name: str, ids: np.ndarray, device: torch.device, dtype: str):
        dtype = getattr(torch, dtype)
        self.model = load_model(variant(name), device=device, dtype=dtype)
        c = self.model.config
        cache = KvCache(
            c.layers, c.mla.kv_lora_rank + c.mla.rope, 1, len(ids), device=device, dtype=dtype
        )
        cache.data.fill_(POISON)
        self.after_attention, self.after_mlp, self.routed, self.scores = [], [], {}, {}
        self._watch()
        tree = TokenTree.chain(torch.tensor(ids, device=device)[None])
        with torch.no_grad():
            hidden, _ = self.model(cache.place(tree), cache)
            self.logits = self.model.logits(hidden)
        self.after_mlp = self.after_mlp[1:]  # the first is the embedding

    def _watch(self) -> None:
        def stream(store):
            return lambda module, args, out: store.append(float64(out[1]))

        for i, layer in enumerate(self.model.layers):
            layer.input_layernorm.register_forward_hook(stream(self.after_mlp))
            layer.post_attention_layernorm.register_forward_hook(stream(self.after_attention))
            if isinstance(layer.mlp, Moe):
                layer.mlp.gate.register_forward_hook(self._route(i))
                layer.mlp.gate.proj.register_forward_hook(self._score(i))
        self.model.norm.register_forward_hook(stream(self.after_mlp))

    def _route(self, i: int):
        def hook(module, args, out):
            self.routed[i] = [t.cpu().numpy() for t in out]

        return hook

    def _score(self, i: int):
        def hook(module, args, out):
            self.scores[i] = float64(out)

        return hook


def choice_scores(logits: np.ndarray, model, i: int) -> np.ndarray:
    """What the router of layer i compares, from its logits."""
    moe = model.layers[i].mlp.gate
    if moe.config.scoring == "softmax":
        e = np.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return 1 / (1 + np.exp(-logits)) + float64(moe.bias)


def oracle_scores(stream: np.ndarray, model, i: int) -> np.ndarray:
    """The same from the oracle's stream after attention, in float64."""
    layer = model.layers[i]
    norm = float64(layer.post_attention_layernorm.weight)
    scale = np.sqrt((stream**2).mean(-1, keepdims=True) + model.config.norm_eps)
    return choice_scores((stream / scale * norm) @ float64(layer.mlp.gate.proj.weight).T, model, i)


def assert_near(what: str, got: np.ndarray, want: np.ndarray, limit: float) -> None:
    """Relative in norm, row by row."""
    if want.size == 0:
        return
    off = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.isfinite(got).all(), f"{what}: not finite"
    assert off.max() <= limit, f"{what}: row {off.argmax()} off by {off.max():.3g} of {limit:.3g}"


def compare_routing(run: Run, want: dict, i: int, clean: np.ndarray) -> np.ndarray:
    """Asserts equal experts where the margin decides; returns the rows whose experts are equal."""
    ids, weights = run.routed[i]
    want_ids, want_weights = (want[f"layers.{i}.router.{k}"] for k in ("ids", "weights"))
    scores = choice_scores(run.scores[i], run.model, i)
    error = np.abs(scores - oracle_scores(want[f"layers.{i}.after_attention"], run.model, i))
    error = error[clean].max(initial=0)
    decided = want[f"layers.{i}.router.margin"] > 2 * error
    same = (np.sort(ids, -1) == np.sort(want_ids, -1)).all(-1)
    assert same[clean & decided].all(), f"layer {i}: experts differ beyond the margin"
    got = np.take_along_axis(weights, np.argsort(ids, -1), -1)
    expected = np.take_along_axis(want_weights, np.argsort(want_ids, -1), -1)
    both = clean & same
    limit = model_limit(run.model.embed_tokens.dtype, i + 1)
    assert_near(f"layer {i} router weights", got[both], expected[both], limit)
    return same


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_streams_routing_and_logits(name, dtype, device):
    want = golden(name)
    run = Run(name, want["prompt.ids"], device, dtype)
    T = len(want["prompt.ids"])
    clean = np.ones(T, bool)
    for i in range(run.model.config.layers):
        limit = model_limit(getattr(torch, dtype), i + 1)
        for part, got in (("attention", run.after_attention), ("mlp", run.after_mlp)):
            if part == "mlp" and i in run.routed:
                clean &= compare_routing(run, want, i, clean)
            key = f"layers.{i}.after_{part}"
            assert_near(key, got[i][clean], want[key][clean], limit)
        if not clean.all():
            clean[clean.argmin() :] = False  # later rows attend to the first that differs
    assert dtype == "bfloat16" or clean.all()
    logits = float64(run.logits[0])
    limit = model_limit(getattr(torch, dtype), run.model.config.layers + 1)
    assert_near("logits", logits[clean], want["prompt.logits"][clean], limit)


def continuation(name: str, kind: str, dtype: str, device) -> tuple[np.ndarray, np.ndarray, float]:
    """Tokens drawn along the oracle's continuation, where its margins decide, and up to where a
    free run must agree."""
    want = golden(name)
    prompt, ids = want["prompt.ids"], want[f"{kind}.ids"]
    run = Run(name, np.concatenate([prompt, ids[:-1]]), device, dtype)
    logits = run.logits[:, len(prompt) - 1 :].contiguous()
    error = np.abs(float64(logits[0]) - want[f"{kind}.logits"]).max()
    seed = int(want["metadata"]["sample_seed"])
    position = torch.arange(len(prompt) - 1, len(prompt) + 63, dtype=torch.int32, device=device)

    def one(value, dtype):
        return torch.tensor([value], dtype=dtype, device=device)

    token, _, finite = ops.sample(
        logits,
        position[None],
        one(seed, torch.int64),
        one(float(kind == "sampled"), torch.float32),
        one(0, torch.int32),
        one(1.0, torch.float32),
        one(0.0, torch.float32),
    )
    assert finite.all()
    return token[0].cpu().numpy(), want[f"{kind}.margin"] > 2 * error, error


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_continuation(name, dtype, kind, device):
    want = golden(name)
    ids = want[f"{kind}.ids"]
    token, decided, error = continuation(name, kind, dtype, device)
    assert (token == ids)[decided].all(), f"off where the margin is over 2 x {error:.3g}"
    assert decided.mean() > (0.9 if dtype == "float32" else 0.2), f"blind: error {error:.3g}"

    engine = Engine(variant(name), device=str(device), dtype=dtype, max_seq_len=len(ids) + 200)
    params = SamplingParams(
        max_tokens=64,
        temperature=float(kind == "sampled"),
        seed=int(want["metadata"]["sample_seed"]),
        ignore_eos=True,
    )
    free = np.array(engine.generate(want["prompt.ids"].tolist(), params).token_ids)
    agreed = len(ids) if decided.all() else int(decided.argmin())
    assert (free[:agreed] == ids[:agreed]).all()
