"""Log-probabilities: of the raw logits, and the same bits whoever asks for how many."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from demo_engine import LISTING, STORY, TEXTS, alone, engine_of, engine_of_kind, outcome, truth_of
from tolerance import ROUNDINGS, U
from variants import variant

from kdtree import Engine, SamplingParams
from kdtree.sampling import MAX_LOGPROBS


@pytest.mark.parametrize("kind", ["none", "chain", "noisy"])
@pytest.mark.parametrize("prompt", [LISTING, STORY], ids=TEXTS)
def test_logprobs_do_not_depend_on_how_many_are_asked(prompt, kind, device):
    params = SamplingParams(max_tokens=8, temperature=2.5, seed=5, ignore_eos=True)
    asked = [None, 0, 1, 5, MAX_LOGPROBS]
    want = {k: alone(device, prompt, replace(params, logprobs=k)) for k in asked}
    most, ids = want[MAX_LOGPROBS].logprobs, want[None].token_ids
    assert want[None].logprobs is None
    assert any(token not in list(entry)[:5] for token, entry in zip(ids, most, strict=True))
    for k in asked[1:]:
        assert want[k].token_ids == ids and len(want[k].logprobs) == len(ids)
        for token, entry, full in zip(ids, want[k].logprobs, most, strict=True):
            values = list(entry.values())
            assert values == sorted(values, reverse=True)
            assert set(entry) == {token, *list(full)[:k]}
            assert all(full[id] == value for id, value in entry.items())
            assert len(full) - MAX_LOGPROBS in (0, 1)
    truth = truth_of(want[None]) * len(asked)
    for batch in (1, 3):  # each beside others that ask for more and for less
        engine = engine_of_kind(kind, device, truth, batch)
        got = engine.generate([prompt] * 5, [replace(params, logprobs=k) for k in asked])
        assert [outcome(r) for r in got] == [outcome(want[k]) for k in asked]


def test_logprobs_are_of_the_raw_logits(device):
    """Whatever temperature, filters and masks: the log-softmax of what the model says."""
    engine, rows = engine_of(device, cuda_graphs=False), []
    logits = engine.model.logits
    free = alone(device, STORY).token_ids
    params = SamplingParams(max_tokens=10, temperature=0.3, top_k=9, top_p=0.8, logprobs=4, seed=1,
                            stop_token_ids=tuple(free[:4]), min_tokens=9)  # fmt: skip
    try:
        engine.model.logits = lambda hidden: rows.append(logits(hidden)) or rows[-1]
        got = engine.generate(STORY, params)
    finally:
        del engine.model.logits
    assert len(rows) == len(got.logprobs) >= 9
    roundings = 1 + sum(ROUNDINGS["top_logprobs"].values())
    for row, token, entry in zip(rows, got.token_ids, got.logprobs, strict=True):
        x = row[0, 0].double().cpu().numpy()
        top = x.max()
        log_sum = np.log(np.exp(x - top).sum())
        best = np.argsort(-x, kind="stable")[:4].tolist()
        assert list(entry) == best if token in best else [*best, token]
        for id, value in entry.items():
            limit = roundings * U[torch.float32] * (1 + top - x[id] + log_sum)
            assert abs(value - (x[id] - top - log_sum)) <= limit
    assert free[0] in got.logprobs[0] and got.token_ids[0] != free[0]  # masked, and yet the best


@pytest.mark.parametrize("k", [63, MAX_LOGPROBS])
def test_logprobs_are_of_a_distribution(k, device):
    engine = Engine(variant("vocab-odd"), device=str(device), max_seq_len=40)
    params = SamplingParams(max_tokens=8, temperature=1.0, logprobs=k, ignore_eos=True)
    for entry in engine.generate([3, 1, 4], params).logprobs:
        assert k <= len(entry) <= k + 1 and max(entry) < 509
        assert 0 < math.fsum(map(math.exp, entry.values())) <= 1
