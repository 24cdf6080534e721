"""The clock of a slice: graph replays, eager calls, and what a trace of the device says of both."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

SAMPLES, LEAST = 20, 5  # of each time; fewer than the former where they take long
SECONDS = 0.5  # for the samples of times that are compared, but for LEAST

Runs = list[Callable[[], object]]


@dataclass(frozen=True)
class Trace:
    """What the device did: us from its first launch to the end, and of these us while anything ran.

    kernels: launches and us, by name, which add up to busy_us; copies and fills count as kernels
    """

    us: float = 0.0
    busy_us: float = 0.0
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def launches(self) -> float:
        return sum(count for count, _ in self.kernels.values())

    def less(self, other: "Trace") -> "Trace":
        """What this has beyond the other."""
        left = {
            name: tuple(a - b for a, b in zip(mine, other.kernels.get(name, (0, 0)), strict=True))
            for name, mine in self.kernels.items()
        }
        left |= {n: (-c, -us) for n, (c, us) in other.kernels.items() if n not in self.kernels}
        kept = {name: found for name, found in left.items() if found[0]}
        return Trace(self.us - other.us, self.busy_us - other.busy_us, kept)

    def over(self, count: float) -> "Trace":
        shares = {name: (n / count, us / count) for name, (n, us) in self.kernels.items()}
        return Trace(self.us / count, self.busy_us / count, shares)


@dataclass(frozen=True)
class Times:
    """Of one run. us: replayed as a graph on CUDA, called on a CPU

    trace: of a replay, None where the device cannot be traced
    """

    us: float
    trace: Trace | None


def measure(forms: list[Runs], device: torch.device) -> list[Times]:
    """The times of one run of each form, medians over rounds in which all forms have a turn.

    So what changes while they are measured, as clocks do, changes for all of them.
    forms: runs that are alike but for what they read, and one after another; capturable on CUDA
    """
    if device.type != "cuda":
        return [Times(us, None) for us in _medians([partial(_wall_us, f, device) for f in forms])]
    with torch.cuda.device(device):
        graphs = [_captured(runs) for runs in forms]
        times = _medians([partial(_replay_us, graph) for graph in graphs])
        traces = [traced(graph.replay, device) for graph in graphs]
    each = zip(forms, times, traces, strict=True)
    return [Times(us / len(runs), trace and trace.over(len(runs))) for runs, us, trace in each]


def eager_us(runs: Runs, device: torch.device) -> float:
    """Wall time of one run that the host launches, the median over rounds of all of them."""
    return _medians([partial(_wall_us, runs, device)])[0]


def traced(run: Callable[[], object], device: torch.device) -> Trace | None:
    """What the device did during a run; None where torch's profiler sees nothing of it."""
    if ProfilerActivity.CUDA not in supported_activities():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize(device)
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    if not events:
        return None
    spans = [(e.time_range.start, e.time_range.end, short(e.name)) for e in events]
    return trace_of(sorted(spans))


def trace_of(spans: list[tuple[float, float, str]]) -> Trace:
    """Of launches in order: begin and end in us, and name.

    Where one begins before those before it have ended, as kernels may that wait for what they need,
    its time is what it adds to theirs.
    """
    kernels, busy, until = {}, 0.0, float("-inf")
    for begin, end, name in spans:
        added = max(end - max(begin, until), 0.0)
        until = max(until, end)
        busy += added
        count, us = kernels.get(name, (0, 0.0))
        kernels[name] = count + 1, us + added
    return Trace(until - spans[0][0], busy, kernels)


def short(name: str) -> str:
    """A kernel's name without its namespaces, arguments and template parameters.

    Of torch's own kernels, which are told apart by a parameter, the first functor stays.
    """
    plain = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    head, _, rest = plain.removeprefix("void ").partition("<")
    head = head.partition("(")[0].rpartition("::")[2].strip()
    words = rest.replace("<", " ").replace(",", " ").replace("(", " ").replace("{", " ").split()
    hints = (word.rpartition("::")[2] for word in words if "at::native::" in word)
    hint = next((h for h in hints if h), "")
    return f"{head}<{hint}>" if hint and "at::native" in plain else head


def _medians(samplers: list[Callable[[], float]]) -> list[float]:
    """Of samples that are taken in turns, after one of each that does not count."""
    for sample in samplers:
        sample()
    taken, end = [], time.perf_counter() + SECONDS
    while len(taken) < SAMPLES and (len(taken) < LEAST or time.perf_counter() < end):
        taken.append([sample() for sample in samplers])
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def _wall_us(runs: Runs, device: torch.device) -> float:
    """Of one run."""
    begin = time.perf_counter()
    for run in runs:
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * (time.perf_counter() - begin) / len(runs)


def _captured(runs: Runs) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, as capturing asks for
        runs[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Of all runs in it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
