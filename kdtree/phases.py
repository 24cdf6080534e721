"""Where a round's time goes: marks between its phases, on the host's clock or the device's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Marks of one round, one after another from its beginning on.

    On CUDA they are events, to be read once the device has come so far: no host sync. In a graph
    they are part of it, and tell of its last replay.
    """

    def __init__(self, device: torch.device, timed: bool = True):
        self._device, self._timed = device, timed
        self._began = mark(device) if timed else None
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        if self._timed:
            self._marks.append((name, mark(self._device)))

    def seconds(self, began: float | torch.cuda.Event | None = None) -> dict[str, float]:
        """By phase, from the mark before it; the first one's from an earlier mark, if given."""
        starts = [began or self._began, *(mark for _, mark in self._marks)]
        return {
            name: end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
            for start, (name, end) in zip(starts, self._marks, strict=False)
        }


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Where the host is, or on CUDA where the device is in its work."""
    if device.type != "cuda":
        return time.perf_counter()
    stream = torch.cuda.current_stream(device)
    event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
    event.record(stream)
    return event


class Spent:
    """Seconds by phase of a call's rounds, of which some were timed."""

    def __init__(self):
        self._rounds = self._timed = 0
        self._seconds: dict[str, float] = {}

    def add(self, seconds: dict[str, float] | None) -> None:
        """One more round; None: not timed"""
        self._rounds += 1
        self._timed += seconds is not None
        for name, each in (seconds or {}).items():
            self._seconds[name] = self._seconds.get(name, 0.0) + each

    def read(self) -> dict[str, float]:
        """Of all rounds so far, as if the others had taken what the timed ones took."""
        factor = self._rounds / max(self._timed, 1)
        return {name: seconds * factor for name, seconds in self._seconds.items()}
