"""How rounds come to the device, and what they emit back to the host, in order."""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kdtree.drafters import Drafted, Drafter, Replanner, Sizes
from kdtree.generation import Generation
from kdtree.graphs import Graphs
from kdtree.phases import Phases
from kdtree.record import Asked, Packed, Records, Round, Sent, to_host
from kdtree.request import Emitted, Request
from kdtree.state import State

Work = Callable[[Asked, Phases | None], Round]


class Launches:
    """Rounds op by op; from a graph, each launched before the host reads the one before; or, where
    the host decides nothing of them, many by one launch."""

    def __init__(self, device: torch.device, graphs: Graphs):
        self._device, self._graphs, self._records = device, graphs, Records(device)
        self._together: Generation | None = None  # that is running
        self._phases = Phases(device)  # of rounds that the device chooses, which begin before that

    def rounds(
        self,
        drafter: Drafter,
        state: State,
        asked: Asked,
        work: Work,
        running: list[Request | None],
        waiting: deque[Request],
        spent: Counter[str],
    ) -> Iterator[list[Emitted]]:
        """What rounds emit, by sequence, until all have ended, or one whose place is waited for.

        work: launches a round; running: by sequence, who the reader of this takes out when it ends
        spent: gets the seconds of every round, by phase
        """
        flight = deque()
        while _least(running, waiting):
            flight.append(self._launch(drafter, state, asked, work))
            while len(flight) > self._graphs.on:  # one is ahead
                yield self._land(drafter, spent, *flight.popleft())
            if not drafter.replans and (made := self._generation(drafter, state, asked, work)):
                while flight and any(running):
                    yield self._land(drafter, spent, *flight.popleft())
                if least := _least(running, waiting):
                    yield from self._run(made, least, spent)
        while flight and any(running):
            yield self._land(drafter, spent, *flight.popleft())

    def end(self, b: int) -> None:
        """Sequence b has ended, as the host sees it."""
        if self._together:
            self._together.end(b)

    def _launch(
        self, drafter: Drafter, state: State, asked: Asked, work: Work
    ) -> tuple[Sent, bool]:
        """A round on its way to the device, and whether others of its kind will take as long."""
        plan = drafter.plan(state)
        if isinstance(plan, Sizes):
            done = self._chosen(drafter, state, asked, work, plan)
        else:
            alone = partial(work, asked, None)
            done = alone() if plan is None else self._graphs(("round", plan, asked), alone)
        return self._records.send(done), self._graphs.steady

    def _chosen(
        self, drafter: Replanner, state: State, asked: Asked, work: Work, plan: Sizes
    ) -> Packed:
        """A round of a size that the device chooses; or the host, which waits for the draft."""

        def first() -> Drafted:
            self._phases.begin()
            return drafter.draft(state)

        def rest(size: int, drafted: Drafted) -> Round:
            drafter.take(drafted, size)
            return work(asked, self._phases)

        graphs, key = self._graphs, ("round", plan, asked)
        if choice := graphs.choice(key, first, [partial(rest, size) for size in plan.sizes]):
            return choice.launch()
        drafted = graphs(("draft", plan), first)
        steady, size = graphs.steady, plan.sizes[int(to_host(drafted.choice))]
        done = graphs((*key, size), partial(rest, size, drafted))
        graphs.steady &= steady
        return done

    def _generation(
        self, drafter: Drafter, state: State, asked: Asked, work: Work
    ) -> Generation | None:
        key = ("round", drafter.plan(state), asked)
        return self._graphs.generation(key, partial(work, asked, None), state.active)

    def _land(
        self, drafter: Drafter, spent: Counter[str], sent: Sent, steady: bool
    ) -> list[Emitted]:
        landed = sent.read()
        spent.update(landed.phases)
        if drafter.replans:
            drafter.learn(landed, steady)
        return landed.emitted

    def _run(self, made: Generation, least: int, spent: Counter[str]) -> Iterator[list[Emitted]]:
        self._together = made
        try:
            for landed in made.run(least):
                spent.update(landed.phases)
                yield landed.emitted
        finally:
            self._together = None


def _least(running: list[Request | None], waiting: deque[Request]) -> int:
    """As many sequences must be running for another round; 0 where none is due."""
    count = sum(request is not None for request in running)
    if waiting:
        return count if count == len(running) else 0
    return min(count, 1)
