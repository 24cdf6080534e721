"""How rounds come to the device, and what they emit back to the host, in order."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from kdtree.drafters import Drafter
from kdtree.generation import Generation
from kdtree.graphs import Graphs
from kdtree.phases import Spent, mark
from kdtree.record import Asked, Records, Round, Sent
from kdtree.request import Emitted, Request
from kdtree.state import State

TIMED = 16  # rounds of which one has its phases timed, where graphs replay them


class Launches:
    """Rounds op by op; from a graph, each launched before the host reads the one before; or, where
    the host decides nothing of them, many by one launch."""

    def __init__(self, device: torch.device, graphs: Graphs):
        self._device, self._graphs, self._records = device, graphs, Records(device)
        self._together: Generation | None = None  # that is running

    def rounds(
        self,
        drafter: Drafter,
        state: State,
        asked: Asked,
        work: Callable[[Asked, bool], Round],
        running: list[Request | None],
        waiting: deque[Request],
        spent: Spent,
    ) -> Iterator[list[Emitted]]:
        """What rounds emit, by sequence, until all have ended, or one whose place is waited for.

        work: launches a round, timed or not; running: by sequence, who the reader of this takes out
        when it ends; spent: hears of every round
        """
        flight, launched = deque(), 0
        while _least(running, waiting):
            flight.append(self._launch(drafter, state, asked, work))
            # The next one's replay would overwrite the times of one that is to be timed.
            ahead = int(self._graphs.on and launched % TIMED > 0)
            launched += 1
            while len(flight) > ahead:
                yield self._land(flight, spent)
            if not flight and not drafter.replans and (least := _least(running, waiting)):
                key, alone = _key(drafter, state, asked), partial(work, asked, False)
                made = self._graphs.generation(key, alone, state.active)
                for emitted in self._run(made, least) if made else ():
                    launched = 0  # the next one is timed again
                    spent.add(None)
                    yield emitted
        while flight and any(running):
            yield self._land(flight, spent)

    def end(self, b: int) -> None:
        """Sequence b has ended, as the host sees it."""
        if self._together:
            self._together.end(b)

    def _launch(
        self, drafter: Drafter, state: State, asked: Asked, work: Callable[[Asked, bool], Round]
    ) -> Sent:
        """A round on its way to the device: replayed, where its like was run before."""
        began = mark(self._device) if drafter.replans else None  # the plan is part of the draft
        timed = partial(work, asked, True)
        key = _key(drafter, state, asked)
        done = timed() if key is None else self._graphs(key, timed)
        return self._records.send(done, began)

    def _land(self, flight: deque[Sent], spent: Spent) -> list[Emitted]:
        sent = flight.popleft()
        emitted = sent.read()
        spent.add(None if flight else sent.phases())
        return emitted

    def _run(self, made: Generation, least: int) -> Iterator[list[Emitted]]:
        self._together = made
        try:
            yield from made.run(least)
        finally:
            self._together = None


def _key(drafter: Drafter, state: State, asked: Asked) -> tuple | None:
    plan = drafter.plan(state)
    return None if plan is None else ("round", plan, asked)


def _least(running: list[Request | None], waiting: deque[Request]) -> int:
    """As many sequences must be running for another round; 0 where none is due."""
    count = sum(request is not None for request in running)
    if waiting:
        return count if count == len(running) else 0
    return min(count, 1)
