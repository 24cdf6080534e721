"""kdtree.layers.beside: what runs on two branches of a graph is what runs one after the other."""

import importlib
from contextlib import contextmanager

import pytest
import torch
from test_engine import engine_of

from kdtree import SamplingParams
from kdtree.graphs import Graphs
from kdtree.layers.beside import beside

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
CUDA = torch.device("cuda")


class Streams:
    """In the place of CUDA's: who waits for whom and what runs where, in order."""

    def __init__(self, monkeypatch, capturing: bool):
        self.said, self.current = [], "main"
        module = importlib.import_module("kdtree.layers.beside")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.of("main"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(module, "_stream", lambda device: self.of("other"))

    def of(self, name: str):
        class Stream:
            def wait_stream(stream, other):
                self.said.append(f"{name} waits for {other.name}")

        Stream.name = name
        return Stream()

    @contextmanager
    def on(self, stream):
        self.current = stream.name
        yield
        self.current = "main"

    def work(self, name: str, fails: bool = False):
        def run():
            self.said.append(f"{name} on {self.current}")
            if fails:
                raise ValueError(name)
            return name

        return run


def test_a_branch_begins_after_what_came_before_and_ends_after_both(monkeypatch):
    streams = Streams(monkeypatch, capturing=True)
    assert beside(streams.work("a"), streams.work("b"), CUDA) == ("a", "b")
    assert streams.said == [
        "other waits for main",
        "a on other",
        "b on main",
        "main waits for other",
    ]


@pytest.mark.parametrize("device, capturing", [("cpu", False), ("cuda", False)])
def test_one_after_the_other_where_nothing_is_captured(device, capturing, monkeypatch):
    streams = Streams(monkeypatch, capturing)
    assert beside(streams.work("a"), streams.work("b"), torch.device(device)) == ("a", "b")
    assert streams.said == ["a on main", "b on main"]


@pytest.mark.parametrize("failing", ["a", "b"])
def test_no_branch_stays_open_where_work_fails(failing, monkeypatch):
    streams = Streams(monkeypatch, capturing=True)
    a, b = (streams.work(name, fails=name == failing) for name in "ab")
    with pytest.raises(ValueError, match=failing):
        beside(a, b, CUDA)
    assert streams.said[-1] == "main waits for other"


@needs_cuda
def test_replays_of_two_branches():
    streams = []
    x = torch.zeros(1 << 22, device=CUDA)

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
        a, b = beside(aside, work, x.device)
        total = a + b
    assert streams[0] != streams[1]
    for value in (1.0, 3.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert total.eq(2 * value + 20 + 4 * value**2).all()


@needs_cuda
@pytest.mark.parametrize("failing", [0, 1])
def test_a_capture_that_fails_says_why_and_spoils_no_other(failing):
    x = torch.ones(4, device=CUDA)

    def fails():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no such thing")
        return x + 1

    both = [lambda: x + 1, lambda: x * 2]
    both[failing] = fails
    graphs = Graphs(x.device)
    graphs("sum", lambda: sum(beside(*both, x.device)))
    with pytest.warns(UserWarning, match="no such thing"):
        graphs("sum", lambda: sum(beside(*both, x.device)))
    assert not graphs.on
    others = Graphs(x.device)
    for _ in range(3):
        got = others("sum", lambda: sum(beside(lambda: x + 1, lambda: x * 2, x.device)))
        assert others.on and got.eq(4).all()


@needs_cuda
def test_the_router_runs_beside_the_shared_expert(monkeypatch):
    """In the rounds that are captured, in all layers that have both."""
    engine, streams = engine_of("base", "cuda", "bfloat16"), {}
    layers = [i for i, layer in enumerate(engine.model.layers) if hasattr(layer.mlp, "gate")]
    for i in layers:
        for name in ("gate", "shared_experts"):
            part = getattr(engine.model.layers[i].mlp, name)

            def watched(*inputs, key=(i, name), forward=part.forward):
                if torch.cuda.is_current_stream_capturing():
                    streams[key] = torch.cuda.current_stream().cuda_stream
                return forward(*inputs)

            monkeypatch.setattr(part, "forward", watched)
    engine.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    assert layers and len(streams) == 2 * len(layers)
    assert all(streams[i, "gate"] != streams[i, "shared_experts"] for i in layers)
