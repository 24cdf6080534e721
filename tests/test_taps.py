"""What drafters see of the target: the residual stream after some of its layers."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from demo_engine import truth_of
from tolerance import model_limit
from variants import golden, variant

from kdtree import Engine, OracleConfig, SamplingParams
from kdtree.cache import KvCache
from kdtree.drafters.base import Stateless
from kdtree.drafters.none import NoneConfig
from kdtree.engine import PREFILL
from kdtree.models import load_model
from kdtree.tree import TokenTree

TAPPED = [("base", "float32"), ("dims", "float32"), ("dense", "bfloat16"), ("one-layer", "float32")]


@pytest.mark.parametrize("name, dtype", TAPPED)
def test_taps_are_the_residual_stream(name, dtype, device):
    want, dtype = golden(name), getattr(torch, dtype)
    ids = torch.tensor(want["prompt.ids"], device=device)[None]
    model = load_model(variant(name), device=device, dtype=dtype)
    c = model.config
    width = c.mla.kv_lora_rank + c.mla.rope
    cache = KvCache(c.layers, width, 1, ids.shape[1], device=device, dtype=dtype)
    step, stream = cache.place(TokenTree.chain(ids)), []
    for layer in model.layers:
        layer.input_layernorm.register_forward_hook(lambda m, args, out: stream.append(out[1]))
    model.norm.register_forward_hook(lambda m, args, out: stream.append(out[1]))
    last = c.layers - 1
    for taps in ({0}, {last}, {0, last}, set(range(1, c.layers, 2)), set(range(c.layers))):
        taps = tuple(sorted(taps))
        stream.clear()
        with torch.no_grad():
            hidden, got = model(step, cache, taps)
            plain, nothing = model(step, cache)
        assert nothing is None and torch.equal(hidden, plain)
        if not taps:
            continue
        assert got.shape == (1, ids.shape[1], len(taps) * c.hidden) and got.dtype == dtype
        for i, part in zip(taps, got[0].split(c.hidden, -1), strict=True):
            assert torch.equal(part, stream[i + 1])  # the first is the embedding
            x, y = part.double().cpu().numpy(), want[f"layers.{i}.after_mlp"]
            off = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1)
            assert off.max() <= model_limit(dtype, i + 1)


@dataclass(frozen=True)
class Recorded:
    """Another drafter's trees; what the engine tells of the target is kept."""

    inner: object
    taps: tuple[int, ...]
    made: list = field(default_factory=list, compare=False)

    def create(self, setup):
        self.made.append(Recorder(self.inner.create(setup), self.taps))
        return self.made[-1]


class Recorder(Stateless):
    def __init__(self, inner, taps):
        self.inner, self.taps, self.nodes = inner, taps, inner.nodes
        self.chunks, self.rounds = [], []

    def start(self, b, request, prompt):
        self.inner.start(b, request, prompt)

    def plan(self, state):
        return None  # it asks the host

    def propose(self, state):
        self.length, self.active = state.length.tolist(), state.active.tolist()
        return self.inner.propose(state)

    def prefill(self, b, taps):
        self.chunks.append((b, taps))

    def commit(self, path, taps):
        self.inner.commit(path, taps)
        self.rounds.append((path, taps, self.length, self.active))

    def rows(self, b) -> torch.Tensor:
        """The taps of sequence b's committed tokens, in order; padding is not looked at."""
        rows = [taps[0] for a, taps in self.chunks if a == b]
        for path, taps, length, active in self.rounds:
            if active[b]:
                assert sum(map(len, rows)) == length[b] - 1  # the root is the last known token
                rows.append(taps[b, path.node[b, : path.length[b]].long()])
        return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafters_get_the_taps_of_what_is_committed(dtype, device, monkeypatch):
    monkeypatch.setitem(PREFILL, device.type, 32)
    prompts, params = [[5, 9, 2, 77, 31] * 16, [4]], SamplingParams(max_tokens=30, ignore_eos=True)

    def run(drafter, batch, calls):
        config = Recorded(drafter, (0, 3))
        budget = "auto" if drafter == NoneConfig() else 12
        engine = Engine(variant("base"), drafter=config, budget=budget, device=str(device),
                        dtype=dtype, max_seq_len=140, max_batch=batch)  # fmt: skip
        assert engine.config.layers == 4
        return engine.generate(calls, params), config.made[0], 2 * engine.config.hidden

    plain = Engine(variant("base"), device=str(device), dtype=dtype, max_seq_len=140)
    truth = truth_of(*plain.generate(prompts, params))
    oracle = OracleConfig(tuple(map(tuple, truth)), 0.6, 3, 7, budget=12)
    got, recorder, width = run(oracle, 2, prompts)
    assert [r.prompt_token_ids + r.token_ids for r in got] == truth
    assert [(b, tuple(taps.shape)) for b, taps in recorder.chunks] == [
        (0, (1, 32, width)), (0, (1, 32, width)), (0, (1, 15, width))
    ]  # fmt: skip
    assert {tuple(taps.shape) for _, taps, _, _ in recorder.rounds} == {(2, 13, width)}
    assert max(len(r.metrics.histogram) for r in got) > 3
    for b, prompt in enumerate(prompts):
        [want], alone, _ = run(NoneConfig(), 1, [prompt])
        assert want.token_ids == got[b].token_ids
        committed = len(prompt) + 29
        assert torch.equal(recorder.rows(b)[:committed], alone.rows(0)[:committed])


def test_taps_of_plain_decoding(device):
    """A row a round, the same as those of one prefill of the whole text."""

    def run(prompt, tokens):
        config = Recorded(NoneConfig(), (1, 3))
        engine = Engine(variant("base"), drafter=config, device=str(device), max_seq_len=60)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return prompt + engine.generate(prompt, params).token_ids, config.made[0]

    text, decoded = run([5, 9, 2, 77, 31] * 4, 20)
    assert [len(taps) for _, taps in decoded.chunks] == [1]
    # One more may be on its way when the host reads of the last one.
    assert sum(active for _, _, _, [active] in decoded.rounds) == 20
    assert {tuple(taps.shape[:2]) for _, taps, _, _ in decoded.rounds} == {(1, 1)}
    _, prefilled = run(text, 1)
    assert torch.equal(decoded.rows(0), prefilled.rows(0)[:-1])
