"""Where a round's time goes: marks between its phases, on the host's clock or the device's."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Seconds by phase. On CUDA the marks are events, read when `read` is called: no host sync."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._open = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._open.append((name, start, self._mark()))

    def read(self) -> dict[str, float]:
        """The seconds so far. On CUDA the last phase must have ended on the device."""
        for name, start, end in self._open:
            took = start.elapsed_time(end) / 1000 if self._cuda else end - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took
        self._open.clear()
        return self.seconds

    def _mark(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
