"""A round whose size the device chooses, as one launch: see csrc/generation.h."""

import weakref

import torch
from torch import Tensor

from kdtree import ops
from kdtree.drafters import Drafted
from kdtree.record import Landed, Round

Captured = tuple[torch.cuda.CUDAGraph, Round]


class Choice:
    """A draft that chooses, and the rounds of which the device then runs one.

    draft: its graph and what it left; rounds: each one's graph and what it leaves; all of them
    captured with keep_graph
    Raises RuntimeError where the driver takes no such graph.
    """

    def __init__(self, draft: tuple[torch.cuda.CUDAGraph, Drafted], rounds: list[Captured]):
        graph, drafted = draft
        self._rounds = [round for _, round in rounds]
        most = max(round.packed.numel() for round in self._rounds)
        self.packed = torch.zeros(1 + most, dtype=torch.int64, device=drafted.choice.device)
        self._made = ops.choice_build(
            graph.raw_cuda_graph(), drafted.choice, self.packed, len(rounds)
        )
        keeps = self.packed, draft, rounds  # their memory is in use
        weakref.finalize(self, _free, self._made, keeps).atexit = False
        for number, (graph, round) in enumerate(rounds):
            ops.choice_add(self._made, number, graph.raw_cuda_graph(), round.packed, self.packed)
        ops.choice_end(self.packed, self._made)

    def launch(self) -> "Choice":
        ops.graph_launch(self.packed, self._made)
        return self

    def read(self, host: Tensor) -> Landed:
        """host: a copy of `packed`"""
        round = self._rounds[int(host[0])]
        return round.read(host[1 : 1 + round.packed.numel()].view(round.packed.shape))


def _free(made: int, keeps: tuple) -> None:
    torch.cuda.synchronize(keeps[0].device)
    ops.graph_free(keeps[0], made)
