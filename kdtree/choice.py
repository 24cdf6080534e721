"""A round whose size the device chooses, as one launch: see csrc/graph/graph.h."""

import torch
from torch import Tensor

from kdtree import native
from kdtree.drafters import Drafted
from kdtree.record import Landed, Round

Captured = tuple[torch.cuda.CUDAGraph, Round]


class Choice:
    """A draft that chooses, and the rounds of which the device then runs one.

    draft: its graph and what it left; rounds: each one's graph and what it leaves; all of them
    captured with keep_graph
    Raises RuntimeError where the driver takes no such graph, or `kdtree._graph` is missing.
    """

    def __init__(self, draft: tuple[torch.cuda.CUDAGraph, Drafted], rounds: list[Captured]):
        native.graph()  # or says why there is none
        graph, drafted = draft
        self._rounds = [round for _, round in rounds]
        most = max(round.packed.numel() for round in self._rounds)
        self.packed = torch.zeros(1 + most, dtype=torch.int64, device=drafted.choice.device)
        self._made = native.make(
            "Choice",
            self.packed.device,
            before=graph.raw_cuda_graph(),
            choice=native.address(drafted.choice, torch.int32),
            record=native.address(self.packed, torch.int64),
            room=self.packed.numel(),
            rounds=[_body(*captured) for captured in rounds],
            keeps=(self.packed, draft, rounds),  # their memory is in use
        )

    def launch(self) -> "Choice":
        native.launch(self._made, self.packed.device)
        return self

    def read(self, host: Tensor) -> Landed:
        """host: a copy of `packed`"""
        round = self._rounds[int(host[0])]
        return round.read(host[1 : 1 + round.packed.numel()].view(round.packed.shape))


def _body(graph: torch.cuda.CUDAGraph, round: Round) -> tuple[int, int, int]:
    """Its graph, its record and how many words that has."""
    packed = round.packed
    return graph.raw_cuda_graph(), native.address(packed, torch.int64), packed.numel()
