"""The model against the oracle, variant by variant: streams, routing, logits, continuations.

How close is close, and what is asked of the choice of experts: see model_run.py.
"""

import numpy as np
import pytest
import torch
from model_run import Run, assert_near, compare, compare_cached, float64, routes_of
from tolerance import model_limit
from variants import golden, names, variant

from kdtree import Engine, SamplingParams, ops

DTYPES = ["float32", "bfloat16"]


def continued_routes(want: dict, kind: str) -> dict:
    """The oracle's (ids, weights) by layer, of the prompt and of its continuation."""
    routes = {}
    for m, (i, prompt) in enumerate(routes_of(want).items()):
        more = [want[f"{kind}.router_{key}"][:, m] for key in ("ids", "weights")]
        routes[i] = [np.concatenate(parts) for parts in zip(prompt, more, strict=True)]
    return routes


def is_fp8(want: dict) -> bool:
    return want["metadata"]["kv_cache_dtype"] == "fp8"


def rows_of(want: dict, what: str, kind: str | None = None) -> list[np.ndarray]:
    """[S, C + R] by layer, "latents" or "cached": of the prompt and a kind's continuation."""
    layers = sum(key.startswith("layers.") and key.endswith(f".{what}") for key in want)
    rows = [want[f"layers.{i}.{what}"] for i in range(layers)]
    if kind is None:
        return rows
    return [np.concatenate([x, want[f"{kind}.{what}"][:, i]]) for i, x in enumerate(rows)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_streams_routing_and_logits(name, dtype, device):
    want = golden(name)
    forced = routes_of(want) if dtype == "bfloat16" else None
    fp8 = is_fp8(want)
    rows = rows_of(want, "cached") if fp8 else None
    compare(Run(variant(name), want["prompt.ids"], device, dtype, forced, fp8, rows), want)


def draws(logits: torch.Tensor, first: int, kind: str, seed: int) -> np.ndarray:
    """The tokens that rows draw, of which the first stands at position `first`.
    logits: [1, rows, W]"""
    device = logits.device
    position = torch.arange(logits.shape[1], dtype=torch.int32, device=device) + first
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
    forced = continued_routes(want, kind) if dtype == "bfloat16" else None
    known = np.concatenate([prompt, ids[:-1]])
    fp8 = is_fp8(want)
    rows = rows_of(want, "cached", kind) if fp8 else None
    run = Run(variant(name), known, device, dtype, forced, fp8, rows)
    if fp8:
        compare_cached(run, rows_of(want, "latents", kind))
    first = len(prompt) - 1
    logits = run.logits[:, first:].contiguous()
    got, expected = float64(logits[0]), want[f"{kind}.logits"]
    limit = model_limit(getattr(torch, dtype), run.model.config.layers + 1)
    assert_near("logits", got, expected, limit)
    error = np.abs(got - expected).max()
    decided = want[f"{kind}.margin"] > 2 * error
    assert decided.mean() > (0.99 if dtype == "float32" else 0.3)
    token = draws(logits, first, kind, int(want["metadata"]["sample_seed"]))
    assert (token == ids)[decided].all(), f"off where the margin is over 2 x {error:.3g}"


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_free_run(name, dtype, kind, device):
    """What the engine emits: the oracle's tokens in float32, and always what the model draws when
    the text comes at once, after the prompt."""
    want = golden(name)
    prompt, seed = want["prompt.ids"], int(want["metadata"]["sample_seed"])
    options = {"dtype": dtype, "kv_cache_dtype": want["metadata"]["kv_cache_dtype"]}
    engine = Engine(variant(name), device=str(device), max_seq_len=len(prompt) + 64, **options)
    params = SamplingParams(temperature=float(kind == "sampled"), seed=seed, ignore_eos=True)
    free = np.array(engine.generate(prompt.tolist(), params).token_ids)
    if dtype == "float32":
        assert (free == want[f"{kind}.ids"]).all()
    known = np.concatenate([prompt, free[:-1]])
    first = len(prompt) - 1
    run = Run(variant(name), known, device, dtype, fp8=is_fp8(want), prefilled=first)
    assert (draws(run.logits, first, kind, seed) == free).all()
