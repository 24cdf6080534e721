"""Rounds replayed from CUDA graphs are the eager ones: the cache, the tokens, bit for bit."""

import time
import warnings

import pytest
import torch
from test_engine import GarbageConfig, engine_of, latents, outcome

from kdtree import Costs, DflashConfig, Engine, NgramConfig, NumericsError, SamplingParams
from kdtree.drafters.ngram import Ngram
from kdtree.graphs import Graphs

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
KINDS = {
    "none": "none",
    "ngram": NgramConfig(),
    "dflash": DflashConfig(),
    "dflash2": DflashConfig(),
}
COSTS = Costs({1: 1.0, 2: 1.04, 4: 1.1, 8: 1.3}, 0.2)


def engines(kind, dtype, batch, budget, **more):
    """One that launches op by op, and one that replays."""
    name = kind if kind.startswith("dflash") else "base"
    budget = "auto" if kind == "none" else budget
    return [
        engine_of(name, "cuda", dtype, KINDS[kind], batch, budget=budget, cuda_graphs=on, **more)
        for on in (False, True)
    ]


def call(number, temperature):
    """Inputs of one call: other prompts, lengths and seeds each time."""
    rng = torch.Generator().manual_seed(number)
    count = 1 + number % 5
    lengths = torch.randint(1, 90, (count,), generator=rng).tolist()
    prompts = [torch.randint(331, (7,), generator=rng).repeat(13)[:n].tolist() for n in lengths]
    most = torch.randint(20, 110, (count,), generator=rng).tolist()
    params = [
        SamplingParams(max_tokens=n, temperature=temperature, seed=number * 9 + i, ignore_eos=True)
        for i, n in enumerate(most)
    ]
    return prompts, params


def assert_left_alike(a: Engine, b: Engine) -> None:
    """Whole cache, positions and tokens of every sequence."""
    assert torch.equal(a.cache.context, b.cache.context)
    assert torch.equal(a.state.length, b.state.length)
    for i, (known, rows) in enumerate(zip(a.state.length, a.cache.context, strict=True)):
        assert torch.equal(a.state.token[i, :known], b.state.token[i, :known])
        assert torch.equal(latents(a, i, int(rows)), latents(b, i, int(rows)))


@needs_cuda
@pytest.mark.parametrize(
    "kind, rounds", [("none", 1000), ("ngram", 1000), ("dflash", 1000), ("dflash2", 100)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_thousand_rounds(kind, dtype, batch, temperature, rounds):
    """Call by call the same, and what the sequences left is the same."""
    eager, graphed = engines(kind, dtype, batch, 7)
    done = number = 0
    while done < rounds:
        prompts, params = call(number, temperature)
        want = eager.generate(prompts, params)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = graphed.generate(prompts, params)
        assert outcome(got) == outcome(want)
        assert [r.metrics.histogram for r in got] == [r.metrics.histogram for r in want]
        assert_left_alike(graphed, eager)
        done += sum(r.metrics.rounds for r in got)
        number += 1
    assert graphed._launches._graphs._together  # rounds were launched together


@needs_cuda
@pytest.mark.parametrize("kind", ["ngram", "dflash"])
@pytest.mark.parametrize("batch", [1, 3])
def test_budgets_that_are_chosen_each_round(kind, batch):
    eager, graphed = engines(kind, "float32", batch, COSTS)
    for number in range(5):
        prompts, params = call(number, 0.7 * (number % 2))
        want, got = eager.generate(prompts, params), graphed.generate(prompts, params)
        assert outcome(got) == outcome(want)
    assert len(graphed.drafter.chosen) > 1


@needs_cuda
@pytest.mark.parametrize("kind", ["none", "ngram", "dflash"])
def test_latents_in_fp8(kind):
    eager, graphed = engines(kind, "bfloat16", 2, 7, kv_cache_dtype="fp8")
    for number in range(5):
        prompts, params = call(number, 0.7 * (number % 2))
        want, got = eager.generate(prompts, params), graphed.generate(prompts, params)
        assert outcome(got) == outcome(want)
        assert_left_alike(graphed, eager)


@needs_cuda
def test_what_a_call_asks_beside_tokens():
    """Log-probabilities, trees, masked tokens: in graphs of their own."""
    eager, graphed = engines("ngram", "bfloat16", 2, 7)
    for number in range(8):
        prompts, params = call(number, 0.0)
        params = [
            SamplingParams(max_tokens=30, logprobs=number % 4, min_tokens=9 * (number % 2),
                           stop_token_ids=tuple(range(60)), ignore_eos=True)
        ] * len(params)  # fmt: skip
        traced = number % 3 == 0
        want, got = (e.generate(prompts, params, trace=traced) for e in (eager, graphed))
        assert outcome(got) == outcome(want)
        assert [r.completions[0].trace for r in got] == [r.completions[0].trace for r in want]


@needs_cuda
def test_a_stream_that_is_closed_with_a_round_on_its_way():
    eager, graphed = engines("dflash", "float32", 1, 7)
    prompts, params = call(6, 1.0)
    want = eager.generate(prompts[0], params[0])
    for taken in (1, 2, 3, 4, 17, 18):
        stream = graphed.stream(prompts[1], params[1])
        for _ in range(taken):
            next(stream)
        stream.close()
        assert outcome([graphed.generate(prompts[0], params[0])]) == outcome([want])


class Asking(Ngram):
    """Says that a graph may take its place, although it asks the host."""

    def propose(self, state):
        assert state.length.tolist()
        return super().propose(state)


@needs_cuda
def test_what_cannot_be_captured_runs_op_by_op(monkeypatch):
    eager, graphed = engines("ngram", "float32", 1, 7)
    monkeypatch.setattr(graphed.drafter, "__class__", Asking)
    (prompt, *_), (params, *_) = call(5, 0.0)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="goes on without CUDA graphs: ") as said:
        for _ in range(2):
            got = graphed.generate([prompt], [params])
            assert outcome(got) == outcome(eager.generate([prompt], [params]))
    assert len(said) == 1 and torch.cuda.current_stream() == stream


@needs_cuda
def test_host_drafters_and_non_finite_logits():
    """A drafter without a plan is called every round; an error says where it was."""
    engine = engine_of("base", "cuda", "float32", GarbageConfig(), budget=5)
    free = engine.generate([1, 2], SamplingParams(max_tokens=40, ignore_eos=True)).token_ids
    assert engine.drafter.plan(engine.state) is None
    graphed = engine_of("base", "cuda", "float32")
    assert (
        graphed.generate([1, 2], SamplingParams(max_tokens=40, ignore_eos=True)).token_ids == free
    )
    fresh = next(i for i, token in enumerate(free) if token not in free[:i] and i > 3)
    graphed.model.embed_tokens[free[fresh]] = float("nan")
    with pytest.raises(NumericsError) as error:
        graphed.generate([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
    assert (error.value.step, error.value.position) == (fresh + 1, 2 + fresh + 1)


@needs_cuda
def test_phases_of_a_replay():
    """They are the device's, and all that a round takes there."""
    engine = engine_of("base", "cuda", "float32", "ngram", budget=7)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    engine.generate([7, 8, 9], params)
    began = time.perf_counter()
    phases = engine.generate([7, 8, 9], params).metrics.phases
    assert set(phases) == {"draft", "forward", "verify", "commit"}
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) < 2 * (time.perf_counter() - began)


@needs_cuda
def test_memory_goes_with_the_graphs():
    def one():
        graphs, x = Graphs(torch.device("cuda")), torch.zeros(1 << 24, device="cuda")
        for _ in range(3):
            graphs("key", lambda: (x + 1).sum() * torch.ones_like(x))

    one()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        one()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def test_without_cuda_work_runs_as_it_is():
    runs, graphs = [], Graphs(torch.device("cpu"))
    assert [graphs("key", lambda: runs.append(1) or len(runs)) for _ in range(3)] == [1, 2, 3]
    assert graphs.steady and not graphs.on


def test_where_a_capture_fails(monkeypatch):
    """All work runs as it is from then on, which is said once."""
    runs, graphs = [], Graphs(torch.device("cpu"))

    def fail(work, graph):
        raise RuntimeError("no such op")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: None)
    monkeypatch.setattr(graphs, "_capture", fail)
    graphs.on = True  # as on CUDA
    with pytest.warns(UserWarning, match="goes on without CUDA graphs: no such op") as said:
        done = [graphs(key, lambda: runs.append(1) or len(runs)) for key in "aaabbb"]
    assert done == [1, 2, 3, 4, 5, 6] and len(said) == 1 and not graphs.on and graphs.steady


def refuse(*_):
    raise RuntimeError("no such node")


def test_where_no_generation_can_be_made(monkeypatch):
    """Each round is launched by the host, which is said once; before its first, nothing is made."""
    graphs, active = Graphs(torch.device("cpu")), torch.ones(1, dtype=torch.bool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: None)
    monkeypatch.setattr(graphs, "_capture", lambda work, graph: (graph, work()))
    monkeypatch.setattr("kdtree.graphs.Generation", refuse)
    graphs.on, graphs._made["known"] = True, None
    assert graphs.generation("new", int, active) is None
    with pytest.warns(UserWarning, match="round is launched by the host: no such node") as said:
        assert [graphs.generation("known", int, active) for _ in range(3)] == [None] * 3
    assert len(said) == 1 and graphs.on


def test_where_no_choice_can_be_made(monkeypatch):
    """The host chooses, which is said once; the first time, nothing is made."""
    graphs = Graphs(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: None)
    monkeypatch.setattr(graphs, "_capture", lambda work, graph: (graph, work()))
    monkeypatch.setattr("kdtree.graphs.Choice", refuse)
    graphs.on = True
    assert graphs.choice("key", int, [str]) is None
    with pytest.warns(UserWarning, match="host chooses each round's nodes: no such node") as said:
        assert [graphs.choice("key", int, [str]) for _ in range(3)] == [None] * 3
    assert len(said) == 1 and graphs.on


def said_by_the_same(eager, graphed) -> list[str]:
    """The warnings of three calls in which both emit the same."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3):
            prompts, params = call(5 * number, 0.0)
            got = outcome(graphed.generate(prompts, params))
            assert got == outcome(eager.generate(prompts, params))
    return [str(warning.message) for warning in said]


@needs_cuda
@pytest.mark.parametrize("refused", [False, True])
def test_whoever_chooses_the_tokens_are_the_same(refused, monkeypatch):
    """The same tokens, in rounds launched op by op, from one graph, or from two with the host
    between; which sizes are chosen may differ, since a round that is ahead is heard of later."""
    eager, graphed = engines("ngram", "float32", 1, COSTS)
    if refused:
        monkeypatch.setattr("kdtree.graphs.Choice", refuse)
    said = said_by_the_same(eager, graphed)
    assert sum("no such node" in each for each in said) == refused
    assert graphed.drafter.chosen.total() > 50 and len(graphed.drafter.chosen) > 1
    assert graphed._launches._graphs.on
