"""A generation as one launch: rounds follow each other on the device, and the host reads along."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from kdtree import native
from kdtree.record import Landed, Round

SLOTS = 64  # rounds that the host may be behind
ROUNDS, READ, LEAST, ENDED = range(4)  # words of `control`, see csrc/graph/graph.h


class Generation:
    """Rounds of one kind, launched together.

    graph: of a round, captured with keep_graph; round: what it leaves; active: [B], who takes part
    Raises RuntimeError where the driver takes no such graph, or `kdtree._graph` is missing.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, round: Round, active: Tensor):
        native.graph()  # or says why there is none
        B, words = len(active), round.packed.numel()
        self._round, self._active = round, active
        self._ring = torch.zeros(SLOTS, words, dtype=torch.int64, pin_memory=True)
        self._control = torch.zeros(ENDED + B, dtype=torch.int64, pin_memory=True)
        self._words = self._control.numpy()
        self._made = native.make(
            "Generation",
            active.device,
            round=graph.raw_cuda_graph(),
            packed=native.address(round.packed, torch.int64),
            active=native.address(active, torch.bool),
            ring=native.address(self._ring, torch.int64),
            control=native.address(self._control, torch.int64),
            B=B,
            words=words,
            slots=SLOTS,
            keeps=(graph, round, active, self._ring, self._control),  # their memory is in use
        )
        self._done = torch.cuda.Event()

    def run(self, least: int) -> Iterator[Landed]:
        """Rounds, one after another, while at least so many sequences run.

        The device goes on meanwhile, up to SLOTS rounds. To end early: `end`, and read on.
        """
        words, shape, read = self._words, self._round.packed.shape, 0
        words[:] = 0
        words[LEAST] = least
        native.launch(self._made, self._active.device)
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
