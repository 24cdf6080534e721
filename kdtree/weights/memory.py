"""Where what is read is kept: an item's own memory on a CPU, or pinned buffers on the way to CUDA.

Both bound what is read ahead. The reader calls them under its lock.
"""

import mmap
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kdtree.weights.numbers import Rule

HUGE_PAGE = 2 << 20  # bytes


class Request(NamedTuple):
    """Tensors that are taken as one, their bytes side by side; borrowed if given back soon.

    rule: for their numbers
    """

    names: tuple[str, ...]
    borrowed: bool = False
    rule: Rule = Rule()


@dataclass(eq=False, slots=True)
class Item:
    """A request, and what of it has been read."""

    request: Request
    nbytes: int
    memory: Tensor | None = None  # [nbytes] uint8, on the device
    pieces: deque["Piece"] = field(default_factory=deque)  # begun and not yet landed
    ahead: int = 0  # bytes of it that count against the ring


@dataclass(eq=False, slots=True)
class Piece:
    """A read of nbytes from `begin` of tensor `name`, to `at` in the item."""

    item: Item
    name: str
    begin: int
    at: int
    nbytes: int
    buffer: Tensor | None = None  # uint8, of nbytes or more
    event: torch.cuda.Event | None = None  # the buffer's last use is over
    done: bool = False


class Host:
    """Memory of the CPU: an item's own, made when its first piece is begun."""

    def __init__(self, ring: int):
        self.ring, self.ahead = ring, 0
        self.wanted = None  # the item that is being taken, which is not ahead
        self.spare, self.spared = {}, 0  # buffers by their size, and the bytes of all

    def has_room(self, piece: Piece) -> bool:
        return piece.item is self.wanted or self.ahead + piece.nbytes <= self.ring

    def begin(self, piece: Piece) -> None:
        item = piece.item
        self._make(item)
        if item is not self.wanted:
            item.ahead += piece.nbytes
            self.ahead += piece.nbytes
        piece.buffer = item.memory[piece.at : piece.at + piece.nbytes]

    def want(self, item: Item) -> None:
        self._make(item)
        self.wanted = item
        self.ahead -= item.ahead

    def land(self, piece: Piece) -> None:
        """It is where it stays."""

    def keep(self, memory: Tensor) -> None:
        """For the next borrowed item of its size."""
        if self.spared + len(memory) > self.ring:  # of sizes that are no longer asked for
            self.spare, self.spared = {}, 0
        if len(memory) <= self.ring:
            self.spare.setdefault(len(memory), []).append(memory)
            self.spared += len(memory)

    def _make(self, item: Item) -> None:
        if item.memory is None and item.request.borrowed and self.spare.get(item.nbytes):
            item.memory = self.spare[item.nbytes].pop()
            self.spared -= item.nbytes
        elif item.memory is None:
            item.memory = _fresh(item.nbytes)


def _fresh(nbytes: int) -> Tensor:
    """Memory that goes back to the system when it is freed, whichever thread made it.

    In huge pages where it fills one, since touching it for the first time costs as much as reading.
    """
    if nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Pinned:
    """Memory of a CUDA device, and the ring of pinned buffers from which it is filled."""

    def __init__(self, ring: int, piece: int, device: torch.device):
        self.device = device
        count = max(1, ring // piece)
        self.free = deque((_pinned(piece), torch.cuda.Event()) for _ in range(count))

    def has_room(self, piece: Piece) -> bool:
        return bool(self.free)

    def begin(self, piece: Piece) -> None:
        piece.buffer, piece.event = self.free.popleft()

    def want(self, item: Item) -> None:
        item.memory = torch.empty(item.nbytes, dtype=torch.uint8, device=self.device)

    def land(self, piece: Piece) -> None:
        """Has it copied on the device's current stream; the event says when that is over."""
        place = piece.item.memory[piece.at : piece.at + piece.nbytes]
        place.copy_(piece.buffer[: piece.nbytes], non_blocking=True)
        piece.event.record(torch.cuda.current_stream(self.device))
        self.free.append((piece.buffer, piece.event))

    def keep(self, memory: Tensor) -> None:
        """The device's own allocator does."""


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
