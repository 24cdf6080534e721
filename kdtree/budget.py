"""The automatic budget: how much of a drafter's tree to verify, by what it costs and brings.

A best-first tree's first N nodes are the best-first tree of N nodes, and those of any tree are a
tree. So the drafter grows one as large as may pay, and each round cuts it where the tokens expected
a second are the most. Where plain decoding is the faster, whole rounds go without a draft, and the
drafter hears of what they committed when it is asked again. No output depends on any of this.
"""

import time
from collections import Counter
from collections.abc import Hashable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kdtree.calibration import Nodes
from kdtree.costs import Costs
from kdtree.drafters import Drafter
from kdtree.graphs import Graphs
from kdtree.models import Deepseek
from kdtree.policy import Policy
from kdtree.record import to_host
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, Path, TokenTree

HELD = 128  # rounds' paths that are held back


class AutoBudget:
    """A drafter whose trees are another's, cut to what pays.

    costs: of rounds, by the sizes to choose among; graphs: for drafts, which come before the choice
    timed: mend the costs by what rounds take
    chosen: how many rounds took each N; drafts: how many had a draft
    The choice is made on the host, from small reads: two a round with a draft, else one.
    """

    replans = True

    def __init__(
        self, drafter: Drafter, costs: Costs, graphs: Graphs | None = None, *, timed: bool = False
    ):
        self.drafter, self.costs = drafter, costs
        self.graphs = graphs or Graphs(torch.device("cpu"))
        self.taps, self.nodes = drafter.taps, drafter.nodes
        self.policy = Policy(costs, drafter.nodes, timed)
        self.chosen: Counter[int] = Counter()
        self.drafts = 0
        self._drafted: bool | None = None  # whether this text's last round had a draft
        self._counts = False  # whether its time does
        self._size, self._began = 1, 0.0  # N of the last round, and when it began
        self._tree: TokenTree | None = None  # what was drafted
        self._walked: Tensor | None = None  # [2, B, 16], nodes of the last path, then log-probs
        self._unread = False  # whether that is news
        self._held = Held()  # what the drafter has not heard of

    def bind(self, model: Deepseek) -> None:
        self.drafter.bind(model)

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        if self._held.sequences == 1:
            self._held.clear()  # nobody will ask
        self._tell()
        self.drafter.start(b, request, prompt)
        self._learn()
        self.policy.start()
        self._drafted, self._counts = None, False  # what the last one takes is not its own any more

    def prefill(self, b: int, taps: Tensor | None) -> None:
        self.drafter.prefill(b, taps)

    def plan(self, state: State) -> Hashable | None:
        self._learn()  # here the host waits for the last round
        self._time()
        drafts, size, own = self.policy.drafts(), 1, self.drafter.plan(state)
        if drafts:
            nodes = Nodes.read(self._draft(state))  # and here for the draft
            drafts = any(row[0] == -1 for row in nodes.parent)  # else all have ended: no lesson
            size = self.policy.choose(nodes) if drafts else 1
        elif self._held.rounds == HELD:
            self._tell()
        self._counts = drafts == self._drafted  # the first of a kind finds its weights elsewhere
        self._counts &= self.graphs.steady
        self._drafted, self._size, self._unread = drafts, size, True
        self._held.rounds += not drafts
        self.drafts += drafts
        self.chosen[size] += 1
        return None if own is None else (drafts, size)

    def propose(self, state: State) -> TokenTree:
        if not self._drafted:
            return TokenTree.root(state.root()).masked(state.active)
        return self._tree.first(self._size)

    def commit(self, path: Path, taps: Tensor | None) -> None:
        walked = torch.stack([path.node, path.logprob.view(torch.int32)])
        walked = F.pad(walked, (0, MAX_DEPTH + 1 - walked.shape[2]), value=-1)
        self._walked = kept(self._walked, walked)
        if self._drafted:
            self.drafter.commit(path, taps)
        else:
            self._held.add(path, taps)

    def _draft(self, state: State) -> Tensor:
        """Nodes.packed of the largest tree that may pay, which stays in place for `propose`."""
        self._tell()
        self.drafter.nodes = self.policy.largest
        plan = self.drafter.plan(state)
        if plan is None:
            return self._drawn(state)
        return self.graphs(("draft", plan), partial(self._drawn, state))

    def _drawn(self, state: State) -> Tensor:
        tree = self.drafter.propose(state)
        if self._tree is None:  # the first one is of as many nodes as ever
            self._tree = TokenTree(*map(torch.clone, tree.tensors))
        for mine, its in zip(self._tree.tensors, tree.tensors, strict=True):
            mine[:, : its.shape[1]].copy_(its)
        return Nodes.packed(tree)

    def _time(self) -> None:
        """A round begins, and the one before has ended."""
        now = time.perf_counter()
        if self.policy.pace and self._counts and self.graphs.steady:
            self.policy.pace.see(now - self._began, self._size, self._drafted)
        self._began = now

    def _learn(self) -> None:
        """What became of the last round."""
        if not self._unread or self._walked is None:
            return
        path, logprob = to_host(self._walked)
        path, logprob = path.tolist(), logprob.view(torch.float32).tolist()
        if self._drafted:
            self.policy.learn(path)
        self.policy.see(logprob, path)
        self._unread = False

    def _tell(self) -> None:
        """The drafter commits what was held back, as one path."""
        if self._held.rounds and self._held.sequences:
            self.drafter.commit(*self._held.joined())
        self._held.clear()


class Held:
    """Rounds of one node each, put one after another where the device has counted to.

    rounds: how many, which the host counts; at: [1] int64, the same on the device
    token: [B, HELD] int64; logprob: [B, HELD] float32; length: [B, HELD] int32; failed: [B] bool
    taps: [B, HELD, -1], or None
    """

    def __init__(self):
        self.rounds = self.sequences = 0
        self.at = self.token = self.logprob = self.length = self.failed = self.taps = None

    def add(self, path: Path, taps: Tensor | None) -> None:
        """One more, which the host has counted already."""
        if self.at is None:
            self._reserve(path, taps)
        for mine, its in (
            (self.token, path.token),
            (self.logprob, path.logprob),
            (self.length, path.length[:, None]),
            (self.taps, taps),
        ):
            if mine is not None:
                mine.index_copy_(1, self.at, its)
        self.failed.copy_(path.failed)
        self.at += 1

    def joined(self) -> tuple[Path, Tensor | None]:
        """All of them as the one path that they make. A sequence that ended stays so."""
        n = torch.arange(self.rounds, dtype=torch.int32, device=self.at.device)
        token, logprob = self.token[:, : self.rounds], self.logprob[:, : self.rounds]
        length = self.length[:, : self.rounds].sum(1, dtype=torch.int32)
        node = torch.where(n < length[:, None], n, -1)
        taps = None if self.taps is None else self.taps[:, : self.rounds].contiguous()
        return Path(node, length, token.contiguous(), logprob.contiguous(), self.failed), taps

    def clear(self) -> None:
        self.rounds = 0
        if self.at is not None:
            self.at.zero_()

    def _reserve(self, path: Path, taps: Tensor | None) -> None:
        self.sequences = len(path.length)

        def room(like: Tensor, *shape: int) -> Tensor:
            return like.new_zeros((self.sequences, *shape))

        self.at = torch.zeros(1, dtype=torch.int64, device=path.token.device)
        self.token, self.logprob = room(path.token, HELD), room(path.logprob, HELD)
        self.length, self.failed = room(path.length, HELD), room(path.failed)
        self.taps = None if taps is None else room(taps, HELD, taps.shape[2])


def kept(place: Tensor | None, value: Tensor) -> Tensor:
    """The value, in the place of the last one, where a graph writes; the first makes the place."""
    return value.clone() if place is None else place.copy_(value)
