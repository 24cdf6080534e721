"""A round decides everything on the device: it can be captured in a CUDA graph and replayed."""

import pytest
import torch
from test_engine import engine_of

from kdtree import DflashConfig, NgramConfig, OracleConfig, SamplingParams
from kdtree.phases import Phases


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("kind", ["none", "ngram", "oracle", "dflash", "dflash2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature, cache", [(0.0, "auto"), (1.0, "auto"), (1.0, "fp8")])
def test_replayed_rounds_emit_what_eager_rounds_emit(kind, dtype, temperature, cache):
    prompt = [5, 9, 2, 77, 31] * 5
    params = SamplingParams(max_tokens=90, temperature=temperature, seed=3, ignore_eos=True)
    name = kind if kind.startswith("dflash") else "base"
    fp8 = {"kv_cache_dtype": cache}
    want = engine_of(name, "cuda", dtype, **fp8).generate(prompt, params).token_ids
    truth = OracleConfig((tuple(prompt + want),), 0.6, depth=9)
    drafter = {"none": "none", "ngram": NgramConfig(), "oracle": truth}.get(kind, DflashConfig())
    budget = "auto" if kind == "none" else 7  # to choose it, the host reads
    engine = engine_of(name, "cuda", dtype, drafter, budget=budget, **fp8)
    untimed = Phases(torch.device("cpu"))
    with torch.no_grad():
        _, requests = engine._requests([prompt], [params], False)
        engine._start(0, requests[0])
        for _ in range(2):
            engine._round(untimed, False, 0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            engine._round(untimed, False, 0)
        for _ in range(90):
            graph.replay()
    assert not engine.state.active.any()
    assert engine.state.length.tolist() == [len(prompt) + 90]
    assert engine.state.token[0, : len(prompt) + 90].tolist() == prompt + want
