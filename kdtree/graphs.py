"""CUDA graphs: work that is the same on the same tensors, launched at once instead of op by op."""

import gc
import warnings
from collections.abc import Callable, Hashable
from functools import partial
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from kdtree.choice import Choice
from kdtree.drafters import Drafted
from kdtree.generation import Generation
from kdtree.record import Round

T = TypeVar("T")
_CAPTURING = Lock()  # one at a time in a process: the collector of garbage is everybody's


class Graphs:
    """Graphs by key, in one memory pool that goes with them.

    The first call of a key runs its work as it is: what is made only once is made outside of a
    graph, and nothing is run that nobody asked for. The second captures it, which runs nothing, and
    replays. What it returned then, later calls return: tensors that the next replay of any of the
    graphs may overwrite. Where a capture fails, all work runs as it is from then on.

    on: whether there are graphs at all: wanted, and CUDA
    steady: whether the last call did what the next one of its key will do, so that it can be timed
    """

    def __init__(self, device: torch.device, wanted: bool = True):
        self.on = wanted and device.type == "cuda"
        self.steady = True
        self._device, self._pool = device, None
        self._made: dict[Hashable, tuple[torch.cuda.CUDAGraph, object] | None] = {}
        self._together: dict[Hashable, Generation] | None = {}  # None where there can be none
        self._chosen: dict[Hashable, Choice | None] | None = {}  # as that

    def __call__(self, key: Hashable, work: Callable[[], T]) -> T:
        """What work() returns. Works of equal keys launch the same kernels on the same tensors."""
        if not self.on:
            return work()
        self.steady = self._made.get(key) is not None
        if key not in self._made:
            self._made[key] = None
            return work()
        if self._made[key] is None:
            self._made[key] = self._captured(work, torch.cuda.CUDAGraph())
        if self._made.get(key) is None:
            return work()
        graph, result = self._made[key]
        with torch.cuda.device(self._device):
            graph.replay()
        return result

    def generation(
        self, key: Hashable, work: Callable[[], Round], active: Tensor
    ) -> Generation | None:
        """Rounds of this key by one launch, once one was run; None before, and where there can be
        none. active: see Generation"""
        if self._together is None or not self.on or key not in self._made:
            return None
        if key not in self._together:
            made = self._captured(work, torch.cuda.CUDAGraph(keep_graph=True))
            try:
                self._together[key] = Generation(*made, active) if made else None
            except (RuntimeError, ValueError) as error:
                self._together, self._pool = None, None  # a pool ends with the last of its graphs
                warnings.warn(f"each round is launched by the host: {error}", stacklevel=2)
                return None
        return self._together[key]

    def choice(
        self,
        key: Hashable,
        draft: Callable[[], Drafted],
        rest: list[Callable[[Drafted], Round]],
    ) -> Choice | None:
        """What draft() and then one of the rest launch, by draft().choice. None the first time of a
        key, when they are to be run as they are, and where there can be none.
        rest: rounds, which take what `draft` returned"""
        if self._chosen is None or not self.on:
            return None
        if key not in self._chosen:
            self._chosen[key] = None
            return None
        if self._chosen[key] is None:
            made = [self._captured(draft, torch.cuda.CUDAGraph(keep_graph=True))]
            for each in rest:
                if not self.on:
                    return None
                work = partial(each, made[0][1])
                made.append(self._captured(work, torch.cuda.CUDAGraph(keep_graph=True)))
            if not self.on:
                return None
            try:
                self._chosen[key] = Choice(made[0], made[1:])
            except (RuntimeError, ValueError) as error:
                self._chosen, self._pool = None, None  # a pool ends with the last of its graphs
                warnings.warn(f"the host chooses each round's nodes: {error}", stacklevel=2)
                return None
        self.steady = True
        return self._chosen[key]

    def _captured(
        self, work: Callable[[], T], graph: torch.cuda.CUDAGraph
    ) -> tuple[torch.cuda.CUDAGraph, T] | None:
        """None where it fails: then there are no graphs any more."""
        try:
            return self._capture(work, graph)
        except RuntimeError as error:
            if self.on:
                warnings.warn(f"decoding goes on without CUDA graphs: {error}", stacklevel=2)
            self.on, self.steady = False, True
            self._made.clear()
            return None

    def _capture(
        self, work: Callable[[], T], graph: torch.cuda.CUDAGraph
    ) -> tuple[torch.cuda.CUDAGraph, T]:
        with _CAPTURING, torch.cuda.device(self._device):
            collecting = gc.isenabled()
            gc.disable()  # what it frees could call CUDA, which ends a capture
            try:
                if self._pool is None:
                    self._pool = torch.cuda.graph_pool_handle()
                stream = torch.cuda.Stream()
                # A capture that fails leaves its stream current; this restores the one that was.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, self._pool, stream, "thread_local"),
                ):
                    return graph, work()
            finally:
                if collecting:
                    gc.enable()
