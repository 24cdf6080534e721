"""Where a round's time goes: the device's clock at the ends of its phases."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kdtree import ops

PHASES = ("draft", "forward", "verify", "commit")


class Phases:
    """One round's clock, which is part of its work, in graphs too: no host sync.

    times: [5] int64, nanoseconds when the round began and when each phase ended
    """

    def __init__(self, device: torch.device):
        self.times = torch.zeros(1 + len(PHASES), dtype=torch.int64, device=device)

    def begin(self) -> "Phases":
        ops.clock(self.times, 0)
        return self

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield
        ops.clock(self.times, 1 + PHASES.index(name))


def seconds(times: list[int]) -> dict[str, float]:
    """By phase, each from the end of the one before it."""
    ends = zip(PHASES, times, times[1:], strict=False)
    return {name: max(end - start, 0) / 1e9 for name, start, end in ends}
