"""When to draft and how much of it to verify, from what rounds cost and drafts have brought."""

import statistics
from collections import deque

import numpy as np

from kdtree.calibration import Calibration, Nodes
from kdtree.costs import Costs

RECENT = 16  # drafts that the mean gain is over
EARLIER = 4  # of them, those before a pause count as
ELSEWHERE = 1  # and those of other texts
FIRST = 2  # rounds of a text that have a draft in any case
RISK = 0.01  # of the time without drafts, to be lost by trying one again
TIMED = 5  # rounds of either kind whose median time counts
DUE = 256  # rounds with a draft, after which one without is timed again
DOUBT = 1.5  # how far wrong the costs are thought to be at most: a busy machine is no measure


class Policy:
    """The choice of a round's N: 1 without a draft, else by what the draft promises.

    A draft gains the tokens of its round less those that plain decoding emits in the same time.
    While the mean gain of the latest drafts is positive, every round has one; else one is tried
    again when plain rounds have gone by of which what it may lose is the hundredth part. Tokens are
    half what came of it and half what it promised: that varies less, and is calibrated by what
    became of earlier drafts, which may have been another matter.
    """

    def __init__(self, costs: Costs, nodes: int, timed: bool):
        """nodes: N of the drafter's largest tree; timed: whether rounds are seen, by `pace`"""
        self.sizes = [size for size in sorted(costs.rounds) if size <= nodes]
        if len(self.sizes) == 1:
            raise ValueError(
                f"rounds has the sizes {sorted(costs.rounds)}, wants one from 2 to the {nodes}"
                " nodes of the drafter's trees"
            )
        self.plain = costs.rounds[1]
        self.seconds = [costs.draft + costs.rounds[size] for size in self.sizes]
        self.calibration = Calibration()
        self.gain = 0.0  # mean tokens, of plain decoding's a round
        self._drafts = 0.0  # that it is over
        self._trials = FIRST  # drafts to come whatever it is
        self._plain_rounds = 0  # since the last draft
        self._reach = len(self.sizes)  # how many of them are looked at
        self.pace = Pace(costs) if timed else None
        self._last: tuple[Nodes, float, float, float] | None = None  # the tree being verified, the
        # tokens that it promised, those of plain decoding, and the seconds that it costs

    def start(self) -> None:
        """A text begins."""
        self._drafts = min(self._drafts, ELSEWHERE)
        self._trials, self._plain_rounds = FIRST, 0

    @property
    def largest(self) -> int:
        """N of the tree to draft."""
        return self.sizes[self._reach - 1]

    def drafts(self) -> bool:
        """Whether the next round has a draft."""
        if self.pace and self.pace.plain_is_due():
            return False
        if self._trials or self.gain > 0:
            return True
        self._plain_rounds += 1
        if self._plain_rounds * RISK < -self.gain:
            return False
        self._drafts = min(self._drafts, EARLIER)
        self._trials, self._plain_rounds = 1, 0
        return True

    def choose(self, nodes: Nodes) -> int:
        """The N with the most tokens expected a second, for a draft of `largest` nodes.

        Costs may be concave, or jump: every size is looked at. A trial is not of one node, which
        would teach nothing.
        """
        tokens = self.calibration.expected(nodes)
        expected = np.array([tokens[size - 1] for size in self.sizes[: self._reach]])
        trial = self._trials > 0
        best = trial + int(np.argmax((expected / self.seconds[: self._reach])[trial:]))
        self._trials -= trial
        # A larger tree is no dearer to draft by much: two sizes beyond the best are looked at.
        self._reach = min(max(best + 3, self._reach - 1), len(self.sizes))
        size = self.sizes[best]
        self._last = nodes.first(size), expected[best], max(tokens[0], 1), self.seconds[best]
        return size

    def learn(self, path: np.ndarray) -> None:
        """What became of the last draft. path: [B, J], the nodes walked, then -1"""
        nodes, promised, plain, seconds = self._last
        self.calibration.observe(nodes, path)
        tokens = (promised + (path >= 0).sum()) / 2 / plain
        gain = tokens - seconds / self.plain * (self.pace.longer() if self.pace else 1)
        self._drafts = min(self._drafts + 1, RECENT)
        self.gain += (gain - self.gain) / self._drafts


class Pace:
    """What rounds take, over what the costs say, of plain ones and of those with a draft.

    The costs are of a short context and of trees that the model made; these are of what is going
    on. Only how one kind stands to the other is used.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self._over = {True: deque(maxlen=TIMED), False: deque(maxlen=TIMED)}  # by whether a draft
        self._drafts = 0  # since the last plain round

    def plain_is_due(self) -> bool:
        return len(self._over[False]) < TIMED or self._drafts >= DUE

    def see(self, seconds: float, size: int, drafted: bool) -> None:
        """A round of N = size took so long."""
        told = self.costs.rounds[size] + self.costs.draft * drafted
        self._over[drafted].append(seconds / told)
        self._drafts = self._drafts + 1 if drafted else 0

    def longer(self) -> float:
        """How many times as long rounds with a draft take as told, where plain ones do as told."""
        if not all(self._over.values()):
            return 1.0
        over = [statistics.median(self._over[drafted]) for drafted in (True, False)]
        return min(max(over[0] / over[1], 1 / DOUBT), DOUBT)
