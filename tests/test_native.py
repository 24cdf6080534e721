"""The extension `kdtree._graph`: what it refuses, what it keeps, and decoding without it."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from says import says
from test_capture import COSTS, call, engines, needs_cuda, said_by_the_same
from test_engine import engine_of, outcome

from kdtree import native
from kdtree.graphs import Graphs

ROOT = Path(__file__).parent.parent
needs_module = pytest.mark.skipif(native._graph is None, reason=native._missing)
HANDLE = 1 << 20  # of no graph: nothing may look at it
GENERATION = dict(
    device=0, round=HANDLE, packed=8, active=8, ring=8, control=8, B=1, words=3, slots=2, keeps=()
)
CHOICE = dict(
    device=0, before=HANDLE, choice=8, record=8, room=10, rounds=[(HANDLE, 8, 9)] * 3, keeps=()
)


@needs_module
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"round": 0}, "round is a null handle, wants that of a captured graph"),
        ({"B": 0}, "B is 0, wants at least 1"),
        ({"words": -1}, "words is -1, wants at least 1"),
        ({"slots": 0}, "slots is 0, wants at least 1"),
    ],
)
def test_a_generation_s_arguments(wrong, message):
    with says(ValueError, message):
        native.graph().Generation(**GENERATION | wrong)


@needs_module
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"before": 0}, "before is a null handle"),
        ({"rounds": []}, "there are 0 rounds, wants 1 to 64"),
        ({"rounds": [(HANDLE, 8, 9)] * 65}, "there are 65 rounds, wants 1 to 64"),
        ({"rounds": [(HANDLE, 8, 9), (0, 8, 9)]}, "round 1 is a null handle"),
        ({"rounds": [(HANDLE, 8, 0)]}, "round 0 leaves 0 words, wants 1 to 9"),
        ({"room": 9}, "round 0 leaves 9 words, wants 1 to 8: the record has room for 9"),
    ],
)
def test_a_choice_s_arguments(wrong, message):
    with says(ValueError, message):
        native.graph().Choice(**CHOICE | wrong)


@needs_module
def test_numbers_that_do_not_fit():
    for wrong in ({"words": 1 << 40}, {"round": -1}, {"packed": None}):
        with says(TypeError, "incompatible constructor arguments"):
            native.graph().Generation(**GENERATION | wrong)


@needs_module
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA")
def test_without_a_driver():
    """It loads, and says what is missing when it is used."""
    for make, given in ((native.graph().Generation, GENERATION), (native.graph().Choice, CHOICE)):
        with says(RuntimeError, "kdtree: CUDA driver"):
            make(**given)


def captured(work) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    return graph


class Rounds:
    """A draft that chooses `number`, and rounds that leave [10, 10] and [20]."""

    def __init__(self, wait: int = 0):
        self.number, self.choice, self.record, *left = (
            torch.zeros(n, dtype=dtype, device="cuda")
            for n, dtype in ((1, torch.int32), (1, torch.int32), (3, torch.int64),
                             (2, torch.int64), (1, torch.int64))
        )  # fmt: skip
        self.left = left
        self.before = captured(lambda: (torch.cuda._sleep(wait), self.choice.copy_(self.number)))
        self.rounds = [captured(lambda x=x, i=i: x.fill_(10 * i + 10)) for i, x in enumerate(left)]

    def arguments(self) -> dict:
        return dict(
            device=0,
            before=self.before.raw_cuda_graph(),
            choice=self.choice.data_ptr(),
            record=self.record.data_ptr(),
            room=3,
            rounds=[
                (graph.raw_cuda_graph(), x.data_ptr(), len(x))
                for graph, x in zip(self.rounds, self.left, strict=True)
            ],
            keeps=self,
        )


@needs_cuda
def test_the_round_that_is_chosen():
    """Its number, then what it leaves; of a number that no round has, the number alone."""
    rounds = Rounds()
    made = native.graph().Choice(**rounds.arguments())
    for number, record in ((1, [1, 20, 0]), (0, [0, 10, 10]), (2, [2, 10, 10]), (1, [1, 20, 10])):
        rounds.number.fill_(number)
        native.launch(made, rounds.record.device)
        assert rounds.record.tolist() == record


@needs_cuda
def test_what_it_uses_lives_until_the_device_is_done():
    rounds = Rounds(wait=100_000_000)  # clocks, about 50 ms
    arguments, stream = rounds.arguments(), torch.cuda.current_stream()
    there, made = weakref.ref(rounds), native.graph().Choice(**arguments)
    del rounds, arguments
    made.launch(stream.cuda_stream)
    assert there() and not stream.query()
    del made
    assert not there() and stream.query()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second device")
@pytest.mark.parametrize("budget", [7, COSTS])
def test_a_device_that_is_not_the_current_one(budget):
    prompts, params = call(5, 0.0)
    engines = [
        engine_of("base", f"cuda:{i}", "float32", "ngram", budget=budget, cuda_graphs=i > 0)
        for i in (0, 1)
    ]
    for _ in range(3):
        want, got = (outcome(e.generate(prompts, params)) for e in engines)
        assert got == want and torch.cuda.current_device() == 0
    graphs = engines[1]._launches._graphs
    assert any((graphs._together | graphs._chosen).values())


@needs_cuda
def test_memory_that_it_cannot_use():
    rounds = Rounds()
    host, pinned = torch.zeros(9), torch.zeros(9, pin_memory=True)
    there = rounds.record.data_ptr()
    choice = rounds.arguments()
    good = GENERATION | dict(
        round=choice["before"], packed=there, active=there, ring=pinned.data_ptr()
    )
    for make, given, wrong, message in (
        ("Choice", choice, {"choice": 0}, "choice is a null pointer, wants memory of device 0"),
        ("Choice", choice, {"record": pinned.data_ptr()}, "record is pinned memory of the host"),
        ("Choice", choice, {"device": 64}, "device is 64, wants 0 to"),
        ("Generation", good, {"ring": host.data_ptr()}, "ring is memory that CUDA does not know"),
        ("Generation", good, {"control": there}, "control is memory of device 0, wants pinned"),
        ("Generation", good, {"active": 0}, "active is a null pointer, wants memory of device 0"),
    ):
        with says(ValueError, message):
            getattr(native.graph(), make)(**given | wrong)


def test_on_a_cpu_nobody_misses_it():
    code = (
        "import sys; sys.modules['kdtree._graph'] = None\n"
        "import kdtree\n"
        "assert kdtree.native._graph is None and 'kdtree._graph' in kdtree.native._missing\n"
        "params = kdtree.SamplingParams(max_tokens=5, ignore_eos=True)\n"
        "engine = kdtree.Engine(drafter='ngram', budget=3, device='cpu')\n"
        "print(len(engine.generate([1, 2, 3], params).token_ids))"
    )
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(native, "_graph", None)
    monkeypatch.setattr(native, "_missing", "no such module")


def test_where_it_is_missing(missing, monkeypatch):
    """The host launches each round, and chooses: each is said once."""
    graphs, active = Graphs(torch.device("cuda")), torch.ones(1, dtype=torch.bool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda **options: None)
    monkeypatch.setattr(graphs, "_capture", lambda work, graph: (graph, work()))
    graphs._made["known"] = None
    why = "kdtree._graph is not there: no such module"
    with pytest.warns(UserWarning, match=f"each round is launched by the host: {why}") as said:
        assert [graphs.generation("known", int, active) for _ in range(3)] == [None] * 3
    assert len(said) == 1
    with pytest.warns(UserWarning, match=f"the host chooses each round's nodes: {why}") as said:
        assert [graphs.choice("key", int, [str]) for _ in range(4)] == [None] * 4
    assert len(said) == 1 and graphs.on


@needs_cuda
@pytest.mark.parametrize("budget", [7, COSTS])
def test_decoding_without_it(missing, budget):
    """One graph a round and the same tokens, which is said once."""
    eager, graphed = engines("ngram", "float32", 1, budget)
    assert sum("no such module" in each for each in said_by_the_same(eager, graphed)) == 1
    assert graphed._launches._graphs.on and any(graphed._launches._graphs._made.values())
