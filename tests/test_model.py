"""The model against the oracle, variant by variant: streams, routing, logits, continuations.

Where a decision (an expert, a token) hangs on less than the run's own error, the oracle's choice
and ours may differ and both be right; everywhere else they must agree. In bfloat16 such decisions
are many, and one of them makes all that follows incomparable: there the experts are compared, and
then the oracle's are used.
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

    def __init__(self, name, ids, device, dtype: str, forced: dict | None = None):
        """forced: the oracle's (ids, weights) by layer, to be used after our own are kept."""
        dtype = getattr(torch, dtype)
        self.forced = forced
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
            if self.forced:
                return tuple(
                    torch.tensor(f).to(t) for f, t in zip(self.forced[i], out, strict=True)
                )

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


def compare_routing(run: Run, want: dict, i: int) -> None:
    """Asserts the oracle's experts wherever the margin decides, and their weights."""
    ids, weights = run.routed[i]
    want_ids, want_weights, margin = (
        want[f"layers.{i}.router.{k}"] for k in ("ids", "weights", "margin")
    )
    stream = want[f"layers.{i}.after_attention"]
    scores = choice_scores(run.scores[i], run.model, i)
    error = np.abs(scores - oracle_scores(stream, run.model, i)).max()
    same = (np.sort(ids, -1) == np.sort(want_ids, -1)).all(-1)
    assert same[margin > 2 * error].all(), f"layer {i}: experts differ beyond the margin"
    assert run.forced or same.all()
    got = np.take_along_axis(weights, np.argsort(ids, -1), -1)
    expected = np.take_along_axis(want_weights, np.argsort(want_ids, -1), -1)
    limit = model_limit(run.model.embed_tokens.dtype, i + 1)
    assert_near(f"layer {i} router weights", got[same], expected[same], limit)


def oracle_routes(want: dict, kind: str | None = None) -> dict:
    """(ids, weights) by layer, of the prompt and, where kind is given, of its continuation."""
    routes = {}
    layers = sorted(int(k.split(".")[1]) for k in want if k.endswith("router.ids"))
    for m, i in enumerate(layers):
        parts = [want[f"layers.{i}.router.{key}"] for key in ("ids", "weights")]
        if kind:
            more = [want[f"{kind}.router_{key}"][:, m] for key in ("ids", "weights")]
            parts = [np.concatenate(p) for p in zip(parts, more, strict=True)]
        routes[i] = parts
    return routes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_streams_routing_and_logits(name, dtype, device):
    want = golden(name)
    forced = oracle_routes(want) if dtype == "bfloat16" else None
    run = Run(name, want["prompt.ids"], device, dtype, forced)
    for i in range(run.model.config.layers):
        limit = model_limit(getattr(torch, dtype), i + 1)
        key = f"layers.{i}.after_attention"
        assert_near(key, run.after_attention[i], want[key], limit)
        if i in run.routed:
            compare_routing(run, want, i)
        key = f"layers.{i}.after_mlp"
        assert_near(key, run.after_mlp[i], want[key], limit)
    limit = model_limit(getattr(torch, dtype), run.model.config.layers + 1)
    assert_near("logits", float64(run.logits[0]), want["prompt.logits"], limit)


def draws(logits: torch.Tensor, prompt: int, kind: str, seed: int) -> np.ndarray:
    """The tokens that rows prompt - 1 and on draw. logits: [1, rows, W]"""
    device = logits.device
    logits = logits[:, prompt - 1 :].contiguous()
    position = torch.arange(logits.shape[1], dtype=torch.int32, device=device) + prompt - 1
    values = (seed, float(kind == "sampled"), 0, 1.0, 0.0)
    dtypes = (torch.int64, torch.float32, torch.int32, torch.float32, torch.float32)
    values = [
        torch.tensor([v], dtype=t, device=device) for v, t in zip(values, dtypes, strict=True)
    ]
    token, _, finite = ops.sample(logits, position[None], *values)
    assert finite.all()
    return token[0].cpu().numpy()


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_continuation(name, dtype, kind, device):
    """Along the oracle's continuation: its logits, and its tokens wherever its margin decides."""
    want = golden(name)
    prompt, ids = want["prompt.ids"], want[f"{kind}.ids"]
    forced = oracle_routes(want, kind) if dtype == "bfloat16" else None
    known = np.concatenate([prompt, ids[:-1]])
    run = Run(name, known, device, dtype, forced)
    got, expected = float64(run.logits[0, len(prompt) - 1 :]), want[f"{kind}.logits"]
    limit = model_limit(getattr(torch, dtype), run.model.config.layers + 1)
    assert_near("logits", got, expected, limit)
    error = np.abs(got - expected).max()
    decided = want[f"{kind}.margin"] > 2 * error
    assert decided.mean() > (0.99 if dtype == "float32" else 0.3)
    token = draws(run.logits, len(prompt), kind, int(want["metadata"]["sample_seed"]))
    assert (token == ids)[decided].all(), f"off where the margin is over 2 x {error:.3g}"


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_free_run(name, dtype, kind, device):
    """What the engine emits: the oracle's tokens in float32, and always what the model draws when
    the whole text is prefilled at once."""
    want = golden(name)
    prompt, seed = want["prompt.ids"], int(want["metadata"]["sample_seed"])
    engine = Engine(variant(name), device=str(device), dtype=dtype, max_seq_len=len(prompt) + 64)
    params = SamplingParams(temperature=float(kind == "sampled"), seed=seed, ignore_eos=True)
    free = np.array(engine.generate(prompt.tolist(), params).token_ids)
    if dtype == "float32":
        assert (free == want[f"{kind}.ids"]).all()
    run = Run(name, np.concatenate([prompt, free[:-1]]), device, dtype)
    assert (draws(run.logits, len(prompt), kind, seed) == free).all()
