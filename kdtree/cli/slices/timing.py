"""The clock of a slice: graph replays, eager calls, and what a trace of the device says of both."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

SAMPLES, LEAST = 20, 5  # of replays; fewer than the former where they take long
SECONDS = 0.25  # for the samples of one thing, but for LEAST


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


def measure(runs: list[Callable[[], object]], device: torch.device) -> Times:
    """One run's times, the medians over rounds of all of them in turns.

    runs: alike but for what they read; capturable on CUDA
    """
    if device.type != "cuda":
        return Times(eager_us(runs, device), None)

    def all_runs() -> None:
        for run in runs:
            run()

    count = len(runs)
    with torch.cuda.device(device):
        graph = _captured(all_runs)
        us = _replay_us(graph) / count
        trace = traced(graph.replay, device)
    return Times(us, trace and trace.over(count))


def eager_us(runs: list[Callable[[], object]], device: torch.device) -> float:
    """Wall time of one run that the host launches; the median over rounds of all of them."""

    def once() -> float:
        begin = time.perf_counter()
        for run in runs:
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    once()
    return 1e6 * _median(once) / len(runs)


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


def _median(sample: Callable[[], float]) -> float:
    samples, end = [], time.perf_counter() + SECONDS
    while len(samples) < SAMPLES and (len(samples) < LEAST or time.perf_counter() < end):
        samples.append(sample())
    return statistics.median(samples)


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, as capturing asks for
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    once()
    return 1e3 * _median(once)
