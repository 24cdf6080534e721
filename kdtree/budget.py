"""The automatic budget: how much of a drafter's tree to verify, by what it costs and brings.

A best-first tree's first N nodes are the best-first tree of N nodes, and those of any tree are a
tree. So the drafter grows its largest, and each round cuts it where the tokens expected a second
are the most. Where plain decoding is the faster, whole rounds go without a draft. No output depends
on any of this.
"""

import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kdtree.cache import KvCache
from kdtree.costs import Costs, measure
from kdtree.drafters import Drafter
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, Path, TokenTree

PRIOR = 1.0  # drafts as good as claimed that are counted before any is seen
POOLED = 3.0  # drafts of a depth that count as much as those of all depths
FADE, FORGET = 0.03, 0.002  # of a count, by a draft that adds to it, and by a round in any case
STALE = 0.1  # of what was learnt, where a trial shows that it holds no more
LATEST = 0.8  # weight of a round by the next one in that comparison
PAUSE, LONGEST = 32, 128  # rounds without a draft, doubled while drafting fails to pay
NOTHING = 8  # such rounds after a draft of no node at all
DRAFTS = 9  # whose median time is a draft's cost
KINDS = 3  # of nodes: on the spine, beside it, below what is beside it


def automatic(
    drafter: Drafter, budget: Costs | str, model: nn.Module, cache: KvCache, state: State
) -> Drafter:
    """The drafter cut by Costs, or by what is measured now; itself where it has nothing to cut."""
    if drafter.nodes == 1:
        return drafter
    costs = budget if isinstance(budget, Costs) else measure(model, cache, state, drafter)
    return AutoBudget(drafter, costs, cache.context.device)


class AutoBudget:
    """A drafter whose trees are another's, cut to what pays.

    costs: of rounds, by the sizes to choose among
    chosen: how many rounds took each N
    The choice is made on the host, from one small read a round; a round without a draft has none.
    After a pause, and at first, one round is on trial: what it brought is read, too.
    """

    def __init__(self, drafter: Drafter, costs: Costs, device: torch.device):
        self.drafter, self.costs = drafter, costs
        self.taps, self.nodes = drafter.taps, drafter.nodes
        self.sizes = [size for size in sorted(costs.rounds) if size <= self.nodes]
        self.calibration = Calibration(self.sizes, device)
        self.chosen: Counter[int] = Counter()
        self._drafts = deque(maxlen=DRAFTS)  # seconds of the latest
        self._pause, self._idle = PAUSE, 0
        self._size = 1  # of the last tree
        self._begin_trial()

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        self.drafter.start(b, request, prompt)
        self._pause = PAUSE  # another text may be another matter
        if self._idle:
            self._idle = 0
            self._begin_trial()

    def prefill(self, b: int, taps: Tensor | None) -> None:
        self.drafter.prefill(b, taps)

    def propose(self, state: State) -> TokenTree:
        if self._last and self._on_trial:
            self._compare(float(self.calibration.emitted))
        if self._idle:
            self._idle -= 1
            self._size, tree = 1, TokenTree.root(state.root()).masked(state.active)
        else:
            began = time.perf_counter()
            tree = self.drafter.propose(state)
            expected = self.calibration.expected(tree).tolist()  # here the host waits
            self._drafts.append(time.perf_counter() - began)
            self._size = self._choose(expected)
            tree = tree.first(self._size)
        self.chosen[self._size] += 1
        return tree

    def commit(self, path: Path, taps: Tensor | None) -> None:
        self.drafter.commit(path, taps)
        self.calibration.observe(path, self._size)

    def _choose(self, expected: list[float]) -> int:
        """expected: tokens of a round by size, of all sequences together"""
        if self._last:
            self._compare(0.0)
        draft, seconds = self.costs.draft, self.costs.rounds
        if draft is None:
            draft = statistics.median(self._drafts)
        i = best_size(expected, [draft + seconds[size] for size in self.sizes])
        offered = expected[-1] > expected[0]
        if self._on_trial and not offered:
            self._idle = NOTHING
        elif self._idle == 0:
            if i == 0 and self._on_trial:
                i = 1  # a trial without a single node would teach nothing
            self._last = expected[i], draft + seconds[self.sizes[i]], expected[0] / seconds[1]
        return self.sizes[i]

    def _begin_trial(self) -> None:
        self._last = None  # of the round before: tokens expected, seconds, plain tokens a second
        self._on_trial, self._expected, self._seconds = True, 0.0, 0.0

    def _compare(self, emitted: float) -> None:
        """Goes on without drafts for a while where the rounds before did not pay.

        emitted: tokens of the last one, where it ends a trial. A trial is won by what it brought,
        too: then what was learnt before holds no more.
        """
        (expected, seconds, plain), self._last = self._last, None
        self._expected = LATEST * self._expected + expected
        self._seconds = LATEST * self._seconds + seconds
        on_trial, self._on_trial = self._on_trial, False
        if self._expected >= plain * self._seconds:
            self._pause = PAUSE
        elif on_trial and emitted >= plain * self._seconds:
            self.calibration.count.mul_(STALE)
            self._expected = emitted
        else:
            self._idle, self._pause = self._pause, min(2 * self._pause, LONGEST)
            self._begin_trial()


def best_size(expected: list[float], seconds: list[float]) -> int:
    """The place of the size with the most tokens a second, the first of equals.

    Costs may be concave, or jump: every size is looked at.
    """
    return max(range(len(expected)), key=lambda i: (expected[i] / seconds[i], -i))


class Calibration:
    """How often drafts come true, beside how often they claim to, by depth and kind.

    count: [2, 15 * 3] float32, claimed and accepted mass of the nodes whose parent was accepted,
    older rounds counting less
    """

    def __init__(self, sizes: list[int], device: torch.device):
        self.last = torch.tensor(sizes, device=device) - 1
        self.count = torch.zeros(2, MAX_DEPTH * KINDS, device=device)
        self.cells = torch.arange(MAX_DEPTH * KINDS, device=device)
        self.emitted = torch.zeros((), device=device)  # tokens of the last round
        self.tree: _Nodes | None = None  # of the last round, if it had a draft

    def expected(self, tree: TokenTree) -> Tensor:
        """Tokens that a round is expected to emit, by size, of all sequences together: [sizes]."""
        self.tree = nodes = _Nodes.of(tree)
        step = (nodes.claim + self._factor()[nodes.cell]).clamp(max=0) * nodes.drafted
        chance = (nodes.lineage @ step[..., None])[..., 0].exp() * nodes.drafted
        tokens = chance.sum(0).cumsum(0) + (tree.parent[:, 0] == -1).sum()
        return tokens[self.last]

    def _factor(self) -> Tensor:
        """Log of accepted over claimed, by cell. What a kind has shown at all depths is what is
        expected where a depth has shown little: [15 * 3]."""
        claimed, accepted = self.count.view(2, MAX_DEPTH, KINDS)
        kind = (accepted.sum(0) + PRIOR) / (claimed.sum(0) + PRIOR)
        return ((accepted + POOLED * kind) / (claimed + POOLED)).log().flatten()

    def observe(self, path: Path, size: int) -> None:
        """Counts what became of the last tree's first `size` nodes, if it had a draft."""
        self.emitted = path.length.sum()
        nodes, self.tree = self.tree, None
        if nodes is None or size == 1:
            return
        nodes = nodes.first(size)
        node = torch.where(path.node < 0, size, path.node).long()  # one beyond takes the padding
        walked = nodes.claim.new_zeros((len(node), size + 1)).scatter(1, node, 1.0)[:, :size]
        offered = walked.gather(1, nodes.parent) * nodes.drafted
        seen = torch.stack([nodes.claim.exp() * offered, walked * offered]).flatten(1)
        seen = seen @ (nodes.cell.flatten()[:, None] == self.cells).float()
        kept = 1 - FORGET - FADE * seen[0].clamp(max=1)
        self.count.mul_(kept).add_(seen)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A tree's nodes, as the calibration sees them.

    drafted: [B, N] bool, neither root nor padding; parent: [B, N] int64, 0 where it has none
    claim: [B, N] float32, log of how likely the drafter says it is after its parent, else 0
    lineage: [B, N, N] float32, 1 for an ancestor or self; cell: [B, N] int64, of the calibration
    """

    drafted: Tensor
    parent: Tensor
    claim: Tensor
    lineage: Tensor
    cell: Tensor

    @staticmethod
    def of(tree: TokenTree) -> "_Nodes":
        drafted = tree.parent >= 0
        parent = tree.parent.clamp(min=0).long()
        claim = tree.score - tree.score.gather(1, parent)
        n = torch.arange(tree.parent.shape[1], device=parent.device)
        lineage = (tree.ancestors[..., None] >> n & 1).float()
        later = (tree.parent[..., None] == tree.parent[:, None]) & (n[:, None] > n)
        later = later.any(2)  # not its parent's best child
        beside = (lineage @ later[..., None].float())[..., 0] > 0
        kind = beside.long() + beside.gather(1, parent)
        cell = (tree.depth - 1).clamp(min=0) * KINDS + kind
        claim = torch.where(drafted, claim, 0).clamp(max=0)
        return _Nodes(drafted, parent, claim, lineage, cell)

    def first(self, size: int) -> "_Nodes":
        return _Nodes(
            self.drafted[:, :size],
            self.parent[:, :size],
            self.claim[:, :size],
            self.lineage[:, :size, :size],
            self.cell[:, :size],
        )
