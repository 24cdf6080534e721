"""What the commands show while weights load."""

import io

import pytest
import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from variants import variant

from kdtree import Engine
from kdtree.cli import draw


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when they are set."""
    now = [100.0]
    monkeypatch.setattr(draw.time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def shown():
    """A bar of two parts, and a function that gives the lines on it."""
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    progress = Progress(TextColumn("{task.description}"), console=console)

    def lines() -> list[str]:
        return [task.description for task in progress.tasks if task.visible]

    bar = draw.Bar(progress, 2)
    bar.begin("part")
    return bar, lines


def test_nothing_in_the_first_second(clock, shown):
    bar, lines = shown
    bar.load(0, 8 * 10**9)
    clock[0] += 0.99
    bar.load(4 * 10**9, 8 * 10**9)
    assert lines() == ["part"]


def test_bytes_rate_and_time_left(clock, shown):
    bar, lines = shown
    bar.load(0, 8 * 10**9)
    clock[0] += 4
    bar.load(2 * 10**9, 8 * 10**9)
    assert lines() == ["part", "weights: 2.0 of 8.0 GB, 0.50 GB/s, 12 s left"]
    bar.load(8 * 10**9, 8 * 10**9)
    assert lines() == ["part"]


def test_a_second_model_begins_anew(clock, shown):
    bar, lines = shown
    for _ in range(2):
        bar.load(0, 10**9)
        clock[0] += 2
        bar.load(5 * 10**8, 10**9)
        assert lines() == ["part", "weights: 0.5 of 1.0 GB, 0.25 GB/s, 2 s left"]
        bar.load(10**9, 10**9)


def test_the_engine_reports_all_bytes():
    seen = []
    path = variant("int4")
    engine = Engine(path, device="cpu", max_seq_len=32, progress=lambda *bytes: seen.append(bytes))
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == total[-1] and len(set(total)) == 1
    size = (path / "model.safetensors").stat().st_size
    assert 0.8 * size < total[0] < size  # all but the header and the stored shapes
    assert engine.dtype == torch.float32
