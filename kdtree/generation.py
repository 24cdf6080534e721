"""A generation as one launch: rounds follow each other on the device, and the host reads along."""

import time
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from kdtree import ops
from kdtree.record import Landed, Round

SLOTS = 64  # rounds that the host may be behind
ROUNDS, READ, LEAST, ENDED = range(4)  # words of `control`, see csrc/generation.h


class Generation:
    """Rounds of one kind, launched together.

    graph: of a round, captured with keep_graph; round: what it leaves; active: [B], who takes part
    Raises RuntimeError where the driver takes no such graph.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, round: Round, active: Tensor):
        B, width = round.packed.shape
        self._round, self._active, self._graph = round, active, graph  # their memory is in use
        self._ring = torch.zeros(SLOTS, B * width, dtype=torch.int64, pin_memory=True)
        self._control = torch.zeros(ENDED + B, dtype=torch.int64, pin_memory=True)
        self._words = self._control.numpy()
        self._made = ops.generation_build(
            graph.raw_cuda_graph(), round.packed, active, self._ring, self._control
        )
        keeps = self._active, self._ring, self._control, graph
        weakref.finalize(self, _free, self._made, keeps).atexit = False
        self._done = torch.cuda.Event()

    def run(self, least: int) -> Iterator[Landed]:
        """Rounds, one after another, while at least so many sequences run.

        The device goes on meanwhile, up to SLOTS rounds. To end early: `end`, and read on.
        """
        words, shape, read = self._words, self._round.packed.shape, 0
        words[:] = 0
        words[LEAST] = least
        ops.graph_launch(self._active, self._made)
        self._done.record(torch.cuda.current_stream(self._active.device))
        try:
            while True:
                over = self._done.query()  # before the count, which is then the last
                if read < words[ROUNDS]:
                    landed = self._round.read(self._ring[read % SLOTS].view(shape))
                    read += 1
                    words[READ] = read
                    yield landed
                elif over:
                    return
                else:
                    time.sleep(0)  # other threads of the host
        finally:
            words[LEAST] = len(self._active) + 1  # whoever leaves early leaves no round behind
            self._done.synchronize()

    def end(self, b: int) -> None:
        """Sequence b takes no part in later rounds: the host has seen an end."""
        self._words[ENDED + b] = 1


def _free(made: int, keeps: tuple) -> None:
    torch.cuda.synchronize(keeps[0].device)
    ops.graph_free(keeps[0], made)
