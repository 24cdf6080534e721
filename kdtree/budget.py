"""The automatic budget: how much of a drafter's tree to verify, by what it costs and brings.

A best-first tree's first N nodes are the best-first tree of N nodes, and those of any tree are a
tree. So the drafter grows one as large as may pay, and each round cuts it where the tokens expected
a second are the most. Where plain decoding is the faster, whole rounds go without a draft, and the
drafter hears of what they committed when it is asked again. No output depends on any of this.
"""

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from kdtree.calibration import Nodes
from kdtree.costs import Costs
from kdtree.drafters import Drafter
from kdtree.policy import Policy
from kdtree.state import State
from kdtree.tree import Path, TokenTree

HELD = 128  # rounds' paths that are held back


class AutoBudget:
    """A drafter whose trees are another's, cut to what pays.

    costs: of rounds, by the sizes to choose among; timed: mend them by what rounds take
    chosen: how many rounds took each N; drafts: how many had a draft
    The choice is made on the host, from small reads: three a round with a draft, else two.
    """

    def __init__(self, drafter: Drafter, costs: Costs, timed: bool = False):
        self.drafter, self.costs = drafter, costs
        self.taps, self.nodes = drafter.taps, drafter.nodes
        self.policy = Policy(costs, drafter.nodes, timed)
        self.chosen: Counter[int] = Counter()
        self.drafts = 0
        self._drafted: bool | None = None  # whether this text's last round had a draft
        self._counts = False  # whether its time does
        self._size, self._began = 1, 0.0  # N of the last round, and when it began
        self._path: Path | None = None  # what became of it
        self._held: list[tuple[Path, Tensor | None]] = []  # what the drafter has not heard of

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        if self._held and len(self._held[0][0].length) == 1:
            self._held.clear()  # nobody will ask
        self._tell()
        self.drafter.start(b, request, prompt)
        self._learn()
        self.policy.start()
        self._drafted, self._counts = None, False  # what the last one takes is not its own any more

    def prefill(self, b: int, taps: Tensor | None) -> None:
        self.drafter.prefill(b, taps)

    def propose(self, state: State) -> TokenTree:
        self._time()
        self._learn()
        drafts = self.policy.drafts()
        self._counts = drafts == self._drafted  # the first of a kind finds its weights elsewhere
        self._drafted = drafts
        if not drafts:
            size, tree = 1, TokenTree.root(state.root()).masked(state.active)
        else:
            self._tell()
            self.drafts += 1
            self.drafter.nodes = self.policy.largest
            tree = self.drafter.propose(state)
            size = self.policy.choose(Nodes.of(tree))  # here the host waits
            tree = tree.first(size)
        self.chosen[size] += 1
        self._size = size
        return tree

    def commit(self, path: Path, taps: Tensor | None) -> None:
        self._path = path
        if self._drafted:
            self.drafter.commit(path, taps)
        else:
            self._held.append((path, taps))
            if len(self._held) == HELD:
                self._tell()

    def _time(self) -> None:
        """A round begins, and the one before has ended."""
        now = time.perf_counter()
        if self.policy.pace and self._counts:
            self.policy.pace.see(now - self._began, self._size, self._drafted)
        self._began = now

    def _learn(self) -> None:
        """What became of the last round."""
        if self._path is None:
            return
        path, logprob = self._path.node.tolist(), self._path.logprob.tolist()
        if self._drafted:
            self.policy.learn(path)
        self.policy.see(logprob, path)
        self._path = None

    def _tell(self) -> None:
        """The drafter commits what was held back, as one path."""
        if self._held:
            paths, taps = zip(*self._held, strict=True)
            self._held.clear()
            self.drafter.commit(joined(paths), None if taps[0] is None else torch.cat(taps, 1))


def joined(paths: Sequence[Path]) -> Path:
    """Rounds of one node each as the one path that they make. A sequence that ended stays so."""
    token, logprob = (torch.cat([getattr(p, x) for p in paths], 1) for x in ("token", "logprob"))
    length = torch.stack([p.length for p in paths]).sum(0, dtype=torch.int32)
    n = torch.arange(len(paths), dtype=torch.int32, device=length.device)
    node = torch.where(n < length[:, None], n, -1)
    return Path(node, length, token, logprob, paths[-1].failed)
