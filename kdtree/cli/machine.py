"""The machine that numbers come from: its name, what it can reach, and a clock for one call.

A results file is one JSON object: card, clocks, driver, date, commit, torch, bandwidth (bytes/s)
and peak (flop/s), both measured in the same run, and rows.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from kdtree.card import card

SAMPLES = 20
CALLS_US = 2000  # of calls in one CUDA graph: so that its launch does not count
MOST_CALLS = 64  # of one graph
CPU_LIMIT_S = 0.5  # for the samples of one CPU call


@dataclass(frozen=True)
class Peaks:
    """bandwidth: bytes/s, the faster of a copy and a read; peak: flop/s of a large product"""

    bandwidth: float
    peak: float


def time_us(fn: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one call, the median of SAMPLES.

    CUDA: of a graph of calls, so no launch from the host counts; fn must be capturable, and it
    sees warm caches unless it turns to another buffer at each call. CPU: wall time, warm.
    """
    if device.type != "cuda":
        return _time_cpu(fn)
    with torch.cuda.device(device):
        return _time_cuda(fn)


def peaks(device: torch.device) -> Peaks:
    """Measured now: CUDA by bfloat16 products, CPU by float32 ones."""
    return Peaks(bandwidth=_bandwidth(device), peak=_peak(device))


def header(device: torch.device, measured: Peaks, commit: str | None = None) -> dict:
    """A results file's facts. commit: for a copy of the sources without its repository."""
    card, clocks, driver = _card(device)
    return {
        "card": card,
        "clocks": clocks,
        "driver": driver,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _commit(),
        "torch": torch.__version__,
        "bandwidth": measured.bandwidth,
        "peak": measured.peak,
    }


def write_results(path: Path, rows: list[dict], facts: dict) -> None:
    path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


def _bandwidth(device: torch.device) -> float:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**29
    size = min(2**30, free // 8)  # far beyond any cache, or what there is
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / time_us(lambda: target.copy_(source), device)
    read = size / time_us(source.sum, device)
    return 1e6 * max(copy, read)


def _peak(device: torch.device) -> float:
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (768, torch.float32)
    a = torch.randn(side, side, device=device).to(dtype)
    return 1e6 * 2 * side**3 / time_us(lambda: a @ a, device)


def _time_cuda(fn: Callable[[], object]) -> float:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up, as capturing asks for
        fn()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    end.synchronize()
    calls = int(min(MOST_CALLS, max(4, CALLS_US / (1e3 * start.elapsed_time(end)))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    samples = []
    for _ in range(SAMPLES):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return 1e3 * statistics.median(samples) / calls


def _time_cpu(fn: Callable[[], object]) -> float:
    fn()
    samples, begin = [], time.perf_counter()
    while len(samples) < SAMPLES and (not samples or time.perf_counter() - begin < CPU_LIMIT_S):
        start = time.perf_counter()
        fn()
        samples.append(time.perf_counter() - start)
    return 1e6 * statistics.median(samples)


def _card(device: torch.device) -> tuple[str, str | None, str | None]:
    """Name, clocks in MHz (now and at most), driver."""
    if device.type == "cpu":
        return card(device), None, None
    index = torch.cuda.current_device() if device.index is None else device.index
    query = "clocks.sm,clocks.max.sm,clocks.mem,driver_version"
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    answer = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", f"--id={uuid}")
    if answer is None:
        return card(device), None, None
    sm, most, memory, driver = answer.split(", ")
    return card(device), f"SM {sm} of {most}, memory {memory}", driver


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if commit and _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"):
        return f"{commit}, changed"
    return commit


def _output(*command: str) -> str | None:
    """What a command prints, None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
