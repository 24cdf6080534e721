"""Reads a checkpoint's tensors ahead of their use, in the order in which they will be taken.

A few threads fill pieces of several MB by plain reads, no mapped pages, and judge the numbers; the
caller's thread takes whole items. On a CPU a piece is read to where it stays,
or into a buffer that is used again where the caller only borrows it. For a CUDA device it is read
into a ring of pinned buffers, and copied from there when it is taken.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Condition, Lock, Thread

import torch
from torch import Tensor

from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.memory import Host, Item, Piece, Pinned, Request
from kdtree.weights.numbers import fault

STEP = 1 << 20  # bytes, less than a core's own cache; a multiple of every dtype's size
Progress = Callable[[int, int], None]  # bytes taken so far, and bytes in all


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read. piece: bytes of one read at most

    ring: bytes that may be read ahead, and that buffers may keep for their next use; no more than
    the largest file has in any case
    """

    threads: int = max(2, min(8, os.cpu_count() or 1))
    piece: int = 8 << 20
    ring: int = 256 << 20

    def __post_init__(self):
        if self.threads < 1 or self.piece < 8 or self.piece % 8 or self.ring < self.piece:
            raise ValueError(f"{self}, wants threads and piece, a multiple of 8, within the ring")


class Reader:
    """Answers the requests in their order. A context manager: leaving it ends the threads.

    device: where the bytes are wanted; progress: called as they are taken
    faults: tensors and what was found wrong with their numbers so far; problems: the caller's own
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        requests: Iterable[Request],
        device: torch.device,
        reading: Reading,
        progress: Progress | None = None,
    ):
        self.checkpoint = checkpoint
        self.faults: set[tuple[str, str]] = set()
        self.problems: list[str] = []
        entries = checkpoint.entries
        self._items = deque(
            Item(request, sum(entries[name].nbytes for name in request.names))
            for request in requests
        )
        self._taken, self._bytes = 0, sum(item.nbytes for item in self._items)
        self._progress = progress or (lambda taken, total: None)
        names = [name for item in self._items for name in item.request.names]
        self._files = dict.fromkeys(entries[name].file for name in names)
        self._left = Counter(entries[name].file for name in names)  # tensors not yet taken
        largest = max((entries[name].begin + entries[name].nbytes for name in names), default=0)
        ring = min(reading.ring, largest)
        cuda = device.type == "cuda"
        self._memory = Pinned(ring, reading.piece, device) if cuda else Host(ring)
        self._rest = _pieces(checkpoint, deque(self._items), reading.piece)
        self._next = next(self._rest, None)
        self._lock = Lock()
        self._room, self._arrival = Condition(self._lock), Condition(self._lock)
        self._stopped, self._error = False, None
        self._threads = [Thread(target=self._work) for _ in range(reading.threads)]

    def __enter__(self) -> "Reader":
        with ExitStack() as opened:  # closes what it could open if it cannot open all
            for file in self._files:
                self._files[file] = self._open(file)
                opened.callback(os.close, self._files[file])
            self._opened = opened.pop_all()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._stopped = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        self._opened.close()

    def take(self, request: Request) -> Tensor:
        """The next request's bytes, uint8 on the device. Raises what went wrong in reading.

        Where a file was taken whole and something is wrong with its numbers, names all such faults.
        """
        self._fail_early()
        item = self._items.popleft()
        assert item.request == request, f"{request} taken, {item.request} is next"
        landed = 0
        with self._lock:
            self._memory.want(item)
            self._room.notify()
            while landed < item.nbytes:
                self._arrival.wait_for(lambda: self._error or item.pieces and item.pieces[0].done)
                if self._error:
                    raise self._error
                piece = item.pieces.popleft()
                self._memory.land(piece)
                self._room.notify()
                landed += piece.nbytes
                self._taken += piece.nbytes
                self._progress(self._taken, self._bytes)
        self._left.subtract(self.checkpoint.entries[name].file for name in request.names)
        memory, item.memory = item.memory, None  # the caller's alone
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Takes back what was borrowed: it is overwritten from here on."""
        with self._lock:
            self._memory.keep(memory)

    def finish(self) -> None:
        """Raises CheckpointError if something is wrong with the numbers read."""
        faults = sorted(f"{name} {what}" for name, what in self.faults.copy())
        self.checkpoint.fail(faults + self.problems)

    def _fail_early(self) -> None:
        """As finish, once a file with a fault was taken whole."""
        entries = self.checkpoint.entries
        if any(not self._left[entries[name].file] for name, _ in self.faults.copy()):
            self.finish()

    def _open(self, file: str) -> int:
        try:
            return os.open(self.checkpoint.directory / file, os.O_RDONLY)
        except OSError as error:
            self.checkpoint.fail([f"{file}: {error}"])

    def _work(self) -> None:
        try:
            while piece := self._begin():
                self._fill(piece)
                with self._lock:
                    piece.done = True
                    self._arrival.notify()
        except Exception as error:  # the caller's thread raises it
            with self._lock:
                self._stopped, self._error = True, self._error or error
                self._room.notify_all()
                self._arrival.notify()

    def _begin(self) -> Piece | None:
        """The next piece, once there is room for it; None when there is no more to do."""

        def can_go_on() -> bool:
            return self._stopped or not self._next or self._memory.has_room(self._next)

        with self._lock:
            self._room.wait_for(can_go_on)
            if self._stopped or not self._next:
                self._room.notify()  # the next thread ends too
                return None
            piece, self._next = self._next, next(self._rest, None)
            self._memory.begin(piece)
            piece.item.pieces.append(piece)
            if can_go_on():
                self._room.notify()
            return piece

    def _fill(self, piece: Piece) -> None:
        """Asks for all of it at once, then copies and checks what a core's cache holds."""
        if piece.event:
            piece.event.synchronize()
        entry, at = self.checkpoint.entries[piece.name], 0
        file, start = self._files[entry.file], entry.begin + piece.begin
        data, dtype = piece.buffer.numpy(), self.checkpoint.dtypes[piece.name]
        try:
            os.posix_fadvise(file, start, piece.nbytes, os.POSIX_FADV_WILLNEED)
            while at < piece.nbytes:
                part = data[at : min(at + STEP, piece.nbytes)]
                got = 0
                while got < len(part):
                    n = os.preadv(file, [part[got:]], start + at + got)
                    if n == 0:
                        raise OSError("it is truncated")
                    got += n
                if wrong := fault(part, dtype, piece.item.request.rule):
                    self.faults.add((piece.name, wrong))
                at += len(part)
        except OSError as error:
            self.checkpoint.fail([f"{entry.file}, at {piece.name}: {error}"])


def _pieces(checkpoint: Checkpoint, items: deque[Item], size: int) -> Iterator[Piece]:
    """Uses the items up, so that none outlives its taking."""
    while items:
        item, at = items.popleft(), 0
        for name in item.request.names:
            nbytes = checkpoint.entries[name].nbytes
            for begin in range(0, nbytes, size):
                yield Piece(item, name, begin, at + begin, min(size, nbytes - begin))
            at += nbytes
