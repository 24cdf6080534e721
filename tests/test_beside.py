"""kdtree.layers.beside: what runs on two branches of a graph is what runs one after the other."""

import pytest
import torch
from test_engine import engine_of

from kdtree import SamplingParams
from kdtree.layers.beside import beside

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
CPU = torch.device("cpu")


def test_one_after_the_other_where_nothing_is_captured():
    order = []
    aside, work = beside(lambda: order.append("aside") or 1, lambda: order.append("work"), CPU)
    assert (aside, work, order) == (1, None, ["aside", "work"])


@needs_cuda
def test_a_graph_has_two_branches():
    """The side branch begins after what came before, and what comes after waits for it."""
    device, streams = torch.device("cuda"), []
    x = torch.zeros(1 << 22, device=device)

    def aside():
        streams.append(torch.cuda.current_stream().cuda_stream)
        y = doubled
        for _ in range(20):  # longer than what it runs beside
            y = y + 1
        return y

    def work():
        streams.append(torch.cuda.current_stream().cuda_stream)
        return doubled.square()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x * 2
        a, b = beside(aside, work, device)
        total = a + b
    assert streams[0] != streams[1]
    for value in (1.0, 3.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert total.eq(2 * value + 20 + 4 * value**2).all()


@needs_cuda
def test_the_router_runs_beside_the_shared_expert(monkeypatch):
    """In the rounds that are captured, in each of their layers that has experts."""
    engine, streams = engine_of("base", "cuda", "bfloat16"), {}
    moe = engine.model.layers[-1].mlp
    for name in ("gate", "shared_experts"):
        part, forward = getattr(moe, name), getattr(moe, name).forward

        def watched(*inputs, name=name, forward=forward):
            if torch.cuda.is_current_stream_capturing():
                streams[name] = torch.cuda.current_stream().cuda_stream
            return forward(*inputs)

        monkeypatch.setattr(part, "forward", watched)
    engine.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(streams) == 2 and streams["gate"] != streams["shared_experts"]
