"""The automatic budget: how much of a drafter's tree to verify, by what it costs and brings.

A best-first tree's first N nodes are the best-first tree of N nodes, and those of any tree are a
tree. So the drafter grows one as large as may pay, and each round cuts it where the tokens expected
a second are the most. Where plain decoding is the faster, whole rounds go without a draft, and the
drafter hears of what they committed when it is asked again. No output depends on any of this.
"""

import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kdtree.cache import KvCache
from kdtree.calibration import Calibration, Nodes
from kdtree.costs import Costs, measure
from kdtree.drafters import Drafter
from kdtree.record import to_host
from kdtree.state import State
from kdtree.tree import Path, TokenTree

LATEST = 0.9  # weight of a round with a draft by the next one, where they are judged together
EARLIER, OTHERS = 3.0, 1.0  # rounds that those before a pause, and of other texts, count as
SEEN = 0.3  # of a round's tokens, as they were emitted; the rest as they were expected
RISK = 0.007  # of the time without drafts, to be lost by trying one again
PAUSE, LONGEST = 8, 128  # rounds without a draft, doubled while drafting fails to pay
NOTHING = 8  # of them after a draft of no node at all
SHORT = 8  # rounds with a draft, after which one gives up on drafting rather than on a trial
TIMED, FEWEST = 9, 3  # rounds whose median counts, and those without which nothing is judged
HELD = 128  # rounds' paths that are held back
REACH = 0.9  # of the best rate, where a larger tree is still looked at


def automatic(
    drafter: Drafter, budget: Costs | str, model: nn.Module, cache: KvCache, state: State
) -> Drafter:
    """The drafter cut by Costs, or by what is measured now; itself where it has nothing to cut."""
    if drafter.nodes == 1:
        return drafter
    costs = budget if isinstance(budget, Costs) else measure(model, cache, state, drafter)
    return AutoBudget(drafter, costs)


class AutoBudget:
    """A drafter whose trees are another's, cut to what pays.

    costs: of rounds, by the sizes to choose among
    chosen: how many rounds took each N
    The choice is made on the host, from two small reads a round; a round without a draft has none.
    """

    def __init__(self, drafter: Drafter, costs: Costs):
        self.drafter, self.costs = drafter, costs
        self.taps, self.nodes = drafter.taps, drafter.nodes
        self.sizes = [size for size in sorted(costs.rounds) if size <= self.nodes]
        self.calibration = Calibration()
        self.pace = Pace(costs)
        self.chosen: Counter[int] = Counter()
        self._record = Record()
        self._reach = len(self.sizes)  # how many of them are looked at
        self._idle: int | None = None  # rounds without a draft, since drafting stopped
        self._pause, self._stretch = PAUSE, 0  # how long at most, and drafts since the last one
        self._nothing = False  # the last draft had no node
        self._first = True  # none of this text's drafts is known yet
        self._drafted = False  # the last round had a draft
        self._last: tuple[Nodes, float] | None = None  # it as it was verified, and what it promised
        self._path: Path | None = None  # and what became of it
        self._held: list[tuple[Path, Tensor | None]] = []  # what the drafter has not heard of

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        if self._held and len(self._held[0][0].length) == 1:
            self._held.clear()  # nobody will ask
        self._tell()
        self.drafter.start(b, request, prompt)
        self.pace.interrupt()
        self._record.shrink(OTHERS)  # another text may be another matter
        self._idle, self._stretch, self._first = None, 0, True

    def prefill(self, b: int, taps: Tensor | None) -> None:
        self.drafter.prefill(b, taps)

    def propose(self, state: State) -> TokenTree:
        self.pace.end()
        self._learn()
        self._drafted = self._drafting()
        if not self._drafted:
            self.pace.begin(None)
            self.calibration.forget()
            size, tree = 1, TokenTree.root(state.root()).masked(state.active)
        else:
            self._tell()
            self.pace.begin(1)
            self.drafter.nodes = self.sizes[self._reach - 1]
            tree = self.drafter.propose(state)
            size = self._choose(Nodes.of(tree))  # here the host waits
            self.pace.size, tree = size, tree.first(size)
        self.chosen[size] += 1
        return tree

    def commit(self, path: Path, taps: Tensor | None) -> None:
        if self._drafted:
            self.drafter.commit(path, taps)
            self._path = path
        else:
            self._held.append((path, taps))
            if len(self._held) == HELD:
                self._tell()

    def _tell(self) -> None:
        """The drafter commits what was held back, as one path."""
        if self._held:
            paths, taps = zip(*self._held, strict=True)
            self._held.clear()
            self.drafter.commit(joined(paths), None if taps[0] is None else torch.cat(taps, 1))

    def _choose(self, nodes: Nodes) -> int:
        trial = self._stretch == 0
        tokens = self.calibration.expected(nodes)
        expected = [float(tokens[size - 1]) for size in self.sizes[: self._reach]]
        self._nothing = trial and expected[-1] == expected[0]
        if self._nothing:
            self._idle, self._last = 0, None
            return 1
        self._stretch += 1
        draft = self.pace.draft()
        seconds = [draft + self.costs.rounds[size] for size in self.sizes]
        i = best_size(expected, seconds[: self._reach])
        self._extend(expected, seconds, expected[i] / seconds[i])
        if i == 0 and trial:
            i = 1  # a trial without a single node would teach nothing
        size = self.sizes[i]
        self._record.add(expected[i], tokens[0], self.costs.rounds[size])
        self._last = (nodes.first(size), expected[i]) if size > 1 else None
        return size

    def _extend(self, expected: list[float], seconds: list[float], best: float) -> None:
        """Looks at larger trees next time where more nodes as good as the last ones may pay, at
        smaller ones where the largest do not."""
        last, sizes = len(expected) - 1, self.sizes
        slope = (expected[-1] - expected[-2]) / (sizes[last] - sizes[last - 1])
        far = [expected[-1] + slope * (size - sizes[last]) for size in sizes[last + 1 :]]
        rates = [e / s for e, s in zip(expected + far, seconds, strict=True)]
        wanted = 1 + max(i for i, rate in enumerate(rates) if rate >= REACH * best)
        self._reach = max(2, wanted, self._reach - 1)

    def _learn(self) -> None:
        """What became of the last draft."""
        path, self._path = self._path, None
        if path is not None and self._last is not None:
            nodes, expected = self._last
            node = to_host(path.node).numpy()
            self.calibration.observe(nodes, node)
            more = float((node >= 0).sum()) - expected
            self._record.tokens += SEEN * more
            if self._first and more > 0:  # what was learnt of other texts does not hold here
                self._record.tokens += (1 - SEEN) * more
                self._pause = min(self._pause, 4 * PAUSE)
            self._first = False

    def _drafting(self) -> bool:
        """Whether this round has a draft."""
        if self.pace.unseen is not None and not self._nothing:
            return self.pace.unseen == "drafted"
        if self._idle is None:
            if self._stretch == 0 or self.pace.loss(self._record) <= 0:
                return True
            self._pause = min(2 * self._pause, LONGEST) if self._stretch < SHORT else PAUSE
            self._idle = self._stretch = 0
            self._record.shrink(EARLIER)
        if self._nothing:
            rests = self._idle < NOTHING
        else:  # looked at now and then: an idle round is to cost nothing
            rests = self._idle % PAUSE or self._idle < self._pause
            if rests and self._idle % PAUSE == 0:
                rests = self._idle * RISK < self.pace.loss(self._record)
        if rests:
            self._idle += 1
            return False
        self._idle = None
        return True


def best_size(expected: list[float], seconds: list[float]) -> int:
    """The place of the size with the most tokens a second, the first of equals.

    Costs may be concave, or jump: every size is looked at.
    """
    return max(range(len(expected)), key=lambda i: (expected[i] / seconds[i], -i))


def joined(paths: Sequence[Path]) -> Path:
    """Rounds of one node each as the one path that they make. A sequence that ended stays so."""
    token, logprob = (torch.cat([getattr(p, x) for p in paths], 1) for x in ("token", "logprob"))
    length = torch.stack([p.length for p in paths]).sum(0, dtype=torch.int32)
    n = torch.arange(len(paths), dtype=torch.int32, device=length.device)
    node = torch.where(n < length[:, None], n, -1)
    return Path(node, length, token, logprob, paths[-1].failed)


@dataclass(slots=True)
class Record:
    """What the latest rounds with a draft came to, older ones counting less.

    rounds: how many; tokens: what they brought; plain: what as many without a draft bring
    seconds: by the costs' table, the draft left out
    """

    rounds: float = 0.0
    tokens: float = 0.0
    plain: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, plain: float, seconds: float) -> None:
        self.scale(LATEST)
        self.rounds += 1
        self.tokens += tokens
        self.plain += plain
        self.seconds += seconds

    def shrink(self, rounds: float) -> None:
        """Counts as so many rounds at most."""
        if self.rounds > rounds:
            self.scale(rounds / self.rounds)

    def scale(self, by: float) -> None:
        for name in ("rounds", "tokens", "plain", "seconds"):
            setattr(self, name, getattr(self, name) * by)


class Pace:
    """Seconds of rounds as they are seen, each from its beginning to the next one's.

    A round of plain decoding is timed as it is, and gives the scale of the table of costs. What
    rounds with a draft take beyond the table is the draft's, the host's work on it included.
    Where the costs name the draft's, nothing is timed.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.size: int | None = None  # N of a round with a draft that is being timed
        self._began: float | None = None
        self._plain: deque[float] = deque(maxlen=TIMED)
        self._drafted: deque[tuple[float, int]] = deque(maxlen=TIMED)

    @property
    def unseen(self) -> str | None:
        """The kind of round that has to be seen before any is judged."""
        if self.costs.draft is not None:
            return None
        if len(self._plain) < FEWEST:
            return "plain"
        return "drafted" if len(self._drafted) < FEWEST else None

    def begin(self, size: int | None) -> None:
        """size: N of a round with a draft, None of one without"""
        self.size, self._began = size, time.perf_counter()

    def end(self) -> None:
        if self._began is None:
            return
        took, self._began = time.perf_counter() - self._began, None
        if self.size is None:
            self._plain.append(took)
        else:
            self._drafted.append((took, self.size))

    def interrupt(self) -> None:
        """What the round being timed takes is not its own any more."""
        self._began = None

    def scale(self) -> float:
        """Seconds of the clock for one of the table's."""
        if self.costs.draft is not None or not self._plain:
            return 1.0
        return statistics.median(self._plain) / self.costs.rounds[1]

    def draft(self) -> float:
        """Seconds of a draft, in the table's."""
        if self.costs.draft is not None:
            return self.costs.draft
        scale, rounds = self.scale(), self.costs.rounds
        if not self._drafted:
            return (time.perf_counter() - self._began) / scale
        beyond = statistics.median(took / scale - rounds[size] for took, size in self._drafted)
        return max(0.0, beyond)

    def loss(self, record: Record) -> float:
        """Rounds of plain decoding that a round with a draft loses, if positive."""
        seconds = record.seconds / record.rounds + self.draft()
        return seconds / self.costs.rounds[1] - record.tokens / record.plain
