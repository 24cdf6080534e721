"""When to draft and how much of it to verify, from what rounds cost and drafts have brought."""

import statistics
from bisect import bisect
from collections import deque
from dataclasses import dataclass
from math import exp, inf, isnan

from kdtree.calibration import Calibration
from kdtree.costs import Costs

RECENT = 16  # drafts that the mean gain is over
EARLIER = 4  # of them, those before a pause count as
ELSEWHERE = 4, 1  # and those of other texts, where they paid and where not
FIRST, AGAIN = 3, 1  # drafts in any case, at first and in another text
TRIAL = 2  # and after a pause: the first one is not timed
RISK = 0.014  # of the time without drafts, to be lost by trying again
SURE = (0.5, 0.8)  # mean probabilities of the latest tokens by which gains are kept apart
LATEST = 8  # tokens that it is over
TIMED = 5  # rounds of a run, at most, whose median time counts
DUE = 128  # rounds with a draft, after which some without are timed again
COMPARED, TOLD = 9, 1  # runs compared whose median counts, and what was told counts as at first
DOUBT = 1.5  # how far wrong the costs are thought to be at most: a busy machine is no measure


@dataclass(slots=True)
class Record:
    """What drafts have brought, after tokens of which the model was about as sure."""

    gain: float = 0.0  # mean tokens, in units of plain decoding's a round
    drafts: float = 0.0  # that it is over
    trials: int = FIRST  # drafts to come whatever it is
    plain_rounds: int = 0  # since the last draft


class Known:
    """What is known of drafts, where text is greedy or where it is sampled."""

    def __init__(self):
        self.calibration = Calibration()
        self.records = [Record() for _ in range(len(SURE) + 1)]  # by how sure the model is


class Policy:
    """The choice of a round's N: 1 without a draft, else by what the draft promises, which
    ops.tree_choose weighs where the draft is.

    A draft gains the tokens of its round less those that plain decoding emits in the same time.
    While the mean gain of the latest drafts is positive, every round has one; else some are tried
    again when plain rounds have gone by of which what they may lose is a small part. Tokens are
    half what came of it and half what it promised: that varies less, and is calibrated by what
    became of earlier drafts, which may have been another matter.

    Drafts come true where the model is sure. How sure it was of its latest tokens is known without
    a draft, so gains are kept apart by that: text that begins to repeat itself is drafted at once.
    All that is known is kept apart by whether text is sampled, which is another matter altogether.
    """

    def __init__(self, costs: Costs, nodes: int, timed: bool):
        """nodes: N of the drafter's largest tree; timed: whether rounds are seen, by `pace`"""
        self.sizes = tuple(size for size in sorted(costs.rounds) if size <= nodes)
        if len(self.sizes) == 1:
            raise ValueError(
                f"rounds has the sizes {sorted(costs.rounds)}, wants one from 2 to the {nodes}"
                " nodes of the drafter's trees"
            )
        self.plain = costs.rounds[1]
        self._seconds = [costs.draft + costs.rounds[size] for size in self.sizes]
        self.pace = Pace(costs) if timed else None
        self._both = Known(), Known()
        self._known = self._both[False]
        self._sure, self._tokens = 0.0, 0.0  # mean probability of the latest tokens; their number
        self._dear = 0.0  # tokens that a draft may cost more than is thought
        self._trial = False  # whether the draft to come is one

    def start(self, sampled: bool) -> None:
        """A text begins. sampled: whether some running sequence's tokens are not greedy"""
        self._known = self._both[sampled]
        for record in self._known.records:
            record.drafts = min(record.drafts, ELSEWHERE[record.gain <= 0])
            record.trials = max(record.trials, AGAIN)
        self._tokens = min(self._tokens, 1.0)

    def see(self, logprob: list[list[float]]) -> None:
        """The tokens of a round, by sequence, by the model's log-probabilities."""
        chances = [exp(min(x, 0.0)) for row in logprob for x in row if not isnan(x)]
        if chances:
            each = len(chances) / len(logprob)
            self._tokens = min(self._tokens + each, LATEST)
            self._sure += (sum(chances) / len(chances) - self._sure) * min(each / self._tokens, 1)

    @property
    def calibration(self) -> Calibration:
        return self._known.calibration

    @property
    def record(self) -> Record:
        """Of drafts after tokens like the latest."""
        return self._known.records[bisect(SURE, self._sure)]

    def drafts(self) -> bool:
        """Whether the next round has a draft."""
        record = self.record
        self._trial = False
        if self.pace and self.pace.plain_is_due() and record.gain < self._dear:
            return False
        if not record.trials and record.gain <= 0:
            record.plain_rounds += 1
            if record.plain_rounds * RISK < TRIAL * -record.gain:
                return False
            record.drafts = min(record.drafts, EARLIER)
            record.trials, record.plain_rounds = TRIAL, 0
        self._trial = record.trials > 0
        record.trials -= self._trial
        return True

    def told(self) -> list[float]:
        """What ops.tree_choose is told for the draft to come: factor, then seconds.

        A trial is not of one node, which would teach nothing.
        """
        first = inf if self._trial else self._seconds[0]
        return [*self.calibration.factor(), first, *self._seconds[1:]]

    def learn(self, size: int, brought: int, promised: float, plain: float) -> None:
        """What became of a draft; before `see`, and after its nodes were counted.

        size: N of its tree; brought: tokens; promised: those that it was expected to bring;
        plain: those of plain decoding
        """
        tokens = (promised + brought) / 2 / max(plain, 1)
        cost = self._seconds[self.sizes.index(size)] / self.plain
        cost *= self.pace.longer() if self.pace else 1
        self._dear = (DOUBT - 1) * cost
        record = self.record
        record.drafts = min(record.drafts + 1, RECENT)
        record.gain += (tokens - cost - record.gain) / record.drafts


class Pace:
    """What rounds with a draft take, over what the costs say, where plain ones take what these say.

    The costs are of a short context, and a tree's grow faster with it than a plain round's; this is
    of what is going on. A machine is fast now and slow then, so rounds are compared that stand
    side by side: where a run of one kind ends, with the run of the other kind before it.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self._compared = deque([1.0] * TOLD, maxlen=COMPARED)
        self._drafted = False  # the kind of the run
        self._run: list[float] = []  # seconds over the costs' of its rounds
        self._before: list[float] = []  # and of the run before it
        self._due = False  # whether plain rounds are run to be timed

    def plain_is_due(self) -> bool:
        if self._drafted:
            self._due = len(self._run) >= DUE
        return self._due and (self._drafted or len(self._run) < TIMED)

    def see(self, seconds: float, size: int, drafted: bool) -> None:
        """A round of N = size took so long, the first of its run left out."""
        if drafted != self._drafted:
            if self._before and self._run:
                run, before = (statistics.median(x[-TIMED:]) for x in (self._run, self._before))
                self._compared.append(run / before if self._drafted else before / run)
            self._drafted, self._before, self._run = drafted, self._run, []
        self._run.append(seconds / (self.costs.rounds[size] + self.costs.draft * drafted))

    def longer(self) -> float:
        """How many times as long rounds with a draft take as told, where plain ones do as told."""
        return min(max(statistics.median(self._compared), 1 / DOUBT), DOUBT)
