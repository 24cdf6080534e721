"""One watched forward of a model, and its comparison with a reference, tensor by tensor.

Where a choice of experts hangs on less than the run's own error, the reference's and ours may
differ and both be right; everywhere else they must agree. In bfloat16 such choices are many, and
one of them makes all that follows incomparable: there the experts are compared, and then the
reference's are used.

So it is with latents cached in FP8, in every dtype: a number next to the middle of two codes may
become either, a step apart. What was appended is compared, and then the reference's rows are read.
"""

from contextlib import contextmanager

import numpy as np
import torch
from fp8_rows import POISON, quantised, widened
from tolerance import model_limit

from kdtree import ops
from kdtree.cache import KvCache
from kdtree.layers import Moe
from kdtree.models import load_model
from kdtree.tree import TokenTree


def float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()


class Run:
    """One forward of known tokens, everything watched."""

    def __init__(
        self,
        directory,
        ids,
        device,
        dtype: str,
        forced: dict | None = None,
        fp8: bool = False,
        rows: list[np.ndarray] | None = None,
        prefilled: int = 0,
    ):
        """What is the reference's is used after our own is kept.

        forced: (ids, weights) by layer; rows: [S, C + R] by layer, of a cache in FP8
        prefilled: so many tokens come first, as the engine brings a prompt; the rest is watched
        """
        dtype = getattr(torch, dtype)
        self.forced, self.rows = forced, rows
        self.model = load_model(directory, device=device, dtype=dtype)
        c = self.model.config
        cache = KvCache.of(c, 1, len(ids), device=device, dtype=dtype, fp8=fp8)
        cache.data.fill_(POISON if fp8 else float("nan"))
        self.after_attention, self.after_mlp, self.routed, self.scores = [], [], {}, {}
        self.cached = []  # [S, C + R] by layer, where rows are the reference's
        ids = torch.tensor(ids, device=device)[None]
        with torch.no_grad(), self._appending():
            if prefilled:
                self.model(cache.place(TokenTree.chain(ids[:, :prefilled]), 0), cache)
                cache.extend(prefilled)
            self._watch()
            hidden, _ = self.model(cache.place(TokenTree.chain(ids[:, prefilled:])), cache)
            self.logits = self.model.logits(hidden)
        self.after_mlp = self.after_mlp[1:]  # the first is the embedding

    @contextmanager
    def _appending(self):
        """Puts the reference's rows in the place of what is appended, where there are any."""
        if self.rows is None:
            yield
            return
        append, both, c = ops.mla_append, ops.mla_query_append, self.model.config.mla

        def instead(cache, kv, w, eps, rope, position, slot, interleaved):
            append(cache, kv, w, eps, rope, position, slot, interleaved)
            own, at = cache.flatten(0, 1), slot.long()
            rows = torch.tensor(self.rows[len(self.cached)])
            self.cached.append(widened(own[at], c.kv_lora_rank, c.rope).numpy())
            own[at] = quantised(rows, c.kv_lora_rank).to(own.device)

        def apart(cache, q, w_uk, kv, w, eps, rope, position, slot, interleaved):
            instead(cache, kv, w, eps, rope, position, slot, interleaved)
            return ops.mla_query(q, w_uk, rope, position, interleaved)

        ops.mla_append, ops.mla_query_append = instead, apart
        try:
            yield
        finally:
            ops.mla_append, ops.mla_query_append = append, both

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


def reference_scores(stream: np.ndarray, model, i: int) -> np.ndarray:
    """The same from the reference's stream after attention, in float64."""
    layer = model.layers[i]
    norm = float64(layer.post_attention_layernorm.weight)
    scale = np.sqrt((stream**2).mean(-1, keepdims=True) + model.config.norm_eps)
    return choice_scores((stream / scale * norm) @ float64(layer.mlp.gate.proj.weight).T, model, i)


def off_by(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative in norm, row by row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def assert_near(what: str, got: np.ndarray, want: np.ndarray, limit: float) -> None:
    if want.size == 0:
        return
    off = off_by(got, want)
    assert np.isfinite(got).all(), f"{what}: not finite"
    assert off.max() <= limit, f"{what}: row {off.argmax()} off by {off.max():.3g} of {limit:.3g}"


def compare_routing(run: Run, want: dict, i: int) -> None:
    """Asserts the reference's experts wherever the margin decides, and their weights."""
    ids, weights = run.routed[i]
    want_ids, want_weights, margin = (
        want[f"layers.{i}.router.{k}"] for k in ("ids", "weights", "margin")
    )
    stream = want[f"layers.{i}.after_attention"]
    scores = choice_scores(run.scores[i], run.model, i)
    error = np.abs(scores - reference_scores(stream, run.model, i)).max()
    same = (np.sort(ids, -1) == np.sort(want_ids, -1)).all(-1)
    assert same[margin > 2 * error].all(), f"layer {i}: experts differ beyond the margin"
    assert run.forced or same.all()
    got = np.take_along_axis(weights, np.argsort(ids, -1), -1)
    expected = np.take_along_axis(want_weights, np.argsort(want_ids, -1), -1)
    limit = model_limit(run.model.embed_tokens.dtype, i + 1)
    assert_near(f"layer {i} router weights", got[same], expected[same], limit)


def compare_cached(run: Run, latents: list[np.ndarray]) -> None:
    """Asserts that every number became one of the codes about it, the nearer one but for the error
    of the stream that it was made of. latents: [S, C + R] by layer, before"""
    dtype, C = run.model.embed_tokens.dtype, run.model.config.mla.kv_lora_rank
    for i, (got, want) in enumerate(zip(run.cached, latents, strict=True)):
        assert np.isfinite(got).all()
        rounding = abs(want) * 2.0**-9  # of bfloat16
        least = abs(want[:, :C]).max(-1, keepdims=True) / 448 * 2.0**-10  # of what is below 2^-6
        rounding[:, :C] = np.maximum(abs(want[:, :C]) * 2.0**-4, least)
        for part in (slice(C), slice(C, None)):
            norm = np.linalg.norm(want[:, part], axis=-1, keepdims=True)
            limit = (1 + 2.0**-3) * model_limit(dtype, i + 1) * norm  # it may move a step's middle
            off = abs(got - want)[:, part] - rounding[:, part] - limit
            assert off.max() <= 0, f"layer {i}: cached numbers off by {off.max():.3g} too much"


def routes_of(want: dict) -> dict:
    """(ids, weights) by layer, of the reference's forward."""
    layers = sorted(int(key.split(".")[1]) for key in want if key.endswith("router.ids"))
    return {i: [want[f"layers.{i}.router.{key}"] for key in ("ids", "weights")] for i in layers}


def compare(run: Run, want: dict) -> None:
    """Streams after each half of a layer, experts and their weights, logits.

    want: by the names of gen_model_ref.py
    """
    dtype = run.model.embed_tokens.dtype
    layers = run.model.config.layers
    if run.rows is not None:
        compare_cached(run, [want[f"layers.{i}.latents"] for i in range(layers)])
    for i in range(layers):
        limit = model_limit(dtype, i + 1)
        key = f"layers.{i}.after_attention"
        assert_near(key, run.after_attention[i], want[key], limit)
        if i in run.routed:
            compare_routing(run, want, i)
        key = f"layers.{i}.after_mlp"
        assert_near(key, run.after_mlp[i], want[key], limit)
    limit = model_limit(dtype, layers + 1)
    assert_near("logits", float64(run.logits[0]), want["prompt.logits"], limit)
