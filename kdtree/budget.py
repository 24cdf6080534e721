"""The automatic budget: how much of a drafter's tree to verify, by what it costs and brings.

A best-first tree's first N nodes are the best-first tree of N nodes, and those of any tree are a
tree. So the drafter grows one as large as may pay, and each round cuts it where the tokens expected
a second are the most. Where plain decoding is the faster, whole rounds go without a draft, and the
drafter hears of what they committed when it is asked again. No output depends on any of this.
"""

from collections import Counter
from collections.abc import Hashable

import torch
from torch import Tensor

from kdtree import ops
from kdtree.calibration import CELLS, KINDS, Nodes
from kdtree.costs import Costs
from kdtree.drafters import Drafted, Drafter, Sizes
from kdtree.models import Deepseek
from kdtree.policy import Policy
from kdtree.record import Landed, floats, to_host
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, Path, TokenTree

HELD = 128  # rounds' paths that are held back
SLOTS = 4  # rounds that may be on their way to the device


class AutoBudget:
    """A drafter whose trees are another's, cut to what pays.

    costs: of rounds, by the sizes to choose among; timed: mend the costs by what rounds take
    chosen: how many rounds took each N; drafts: how many had a draft
    Whether a round has a draft is chosen on the host, by the rounds that it has heard of; how much
    of it is verified, where the draft is.
    """

    replans = True

    def __init__(self, drafter: Drafter, costs: Costs, *, timed: bool = False):
        self.drafter, self.costs = drafter, costs
        self.taps, self.nodes = drafter.taps, drafter.nodes
        self.policy = Policy(costs, drafter.nodes, timed)
        self.chosen: Counter[int] = Counter()
        self.drafts = 0
        self._drafts = False  # whether the round to come has a draft
        self._told: Told | None = None  # of the device, what the policy tells
        self._drafted: Drafted | None = None
        self._size: int | None = None  # of the tree to propose; None: still to be drafted
        self._tree: TokenTree | None = None  # that is proposed
        self._last: bool | None = None  # whether this text's last round had a draft
        self._starts = True  # whether a text begins
        self._held = Held()  # what the drafter has not heard of

    def bind(self, model: Deepseek) -> None:
        self.drafter.bind(model)

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        if self._held.sequences == 1:
            self._held.clear()  # nobody will ask
        self._tell()
        self.drafter.start(b, request, prompt)
        self._last, self._starts = None, True

    def prefill(self, b: int, taps: Tensor | None) -> None:
        self.drafter.prefill(b, taps)

    def plan(self, state: State) -> Hashable | None:
        if self._starts:  # nothing is under way
            sampled = (state.sampling.temperature > 0) & state.active
            self.policy.start(bool(to_host(sampled).any()))
            self._starts = False
        own, self._drafts = self.drafter.plan(state), self.policy.drafts()
        self._size = None
        if self._drafts:
            self._tell()
            if self._told is None:
                self._told = Told(self.policy.sizes, state.length.device)
            self._told.send(torch.from_numpy(self.policy.told()))
        else:
            if self._held.rounds == HELD:
                self._tell()
            self._held.rounds += 1
        if own is None:
            return None
        return Sizes(self.policy.sizes, own) if self._drafts else ("plain", own)

    def draft(self, state: State) -> Drafted:
        tree, told = self.drafter.propose(state), self._told
        choice, expected = ops.tree_choose(
            tree.parent, tree.depth, tree.score, told.factor, told.sizes, told.seconds
        )
        return Drafted(tree, choice, expected)

    def take(self, drafted: Drafted, size: int) -> None:
        self._drafted, self._size = drafted, size

    def propose(self, state: State) -> TokenTree:
        if not self._drafts:
            return TokenTree.root(state.token, state.active, state.length)
        if self._size is None:
            drafted = self.draft(state)
            self.take(drafted, self.policy.sizes[int(to_host(drafted.choice))])
        self._tree = self._drafted.tree.first(self._size)
        return self._tree

    def commit(self, path: Path, taps: Tensor | None) -> Tensor:
        walked = [path.node, path.logprob.view(torch.int32)]
        if not self._drafts:
            self._held.add(path, taps)
            return torch.cat(walked, 1)
        self.drafter.commit(path, taps)
        tree, expected = self._tree, self._drafted.expected
        brought = torch.stack([expected[self._size - 1], expected[0]]).view(torch.int32)
        drawn = [tree.parent, tree.depth, tree.score.view(torch.int32)]
        return torch.cat([*walked, *drawn, brought.expand(len(path.length), 2)], 1)

    def learn(self, landed: Landed, steady: bool) -> None:
        N = landed.nodes
        J, told = min(N, MAX_DEPTH + 1), landed.told
        path, logprob = told[:, :J].tolist(), floats(told[:, J : 2 * J]).tolist()
        if all(row[0] < 0 for row in path):
            return  # all had ended, or failed
        drafted = told.shape[1] > 2 * J
        if drafted:
            parent, depth, score, brought = told[:, 2 * J :].split((N, N, N, 2), 1)
            nodes = Nodes.of(parent, depth, floats(score))
            self.policy.learn(nodes, path, N, *floats(brought[0]).tolist())
        self.policy.see(logprob, path)
        # The first round of a kind finds its weights elsewhere.
        if self.policy.pace and steady and drafted == self._last:
            self.policy.pace.see(sum(landed.phases.values()), N, drafted)
        self._last = drafted
        self.chosen[N] += 1
        self.drafts += drafted

    def _tell(self) -> None:
        """The drafter commits what was held back, as one path."""
        if self._held.rounds and self._held.sequences:
            self.drafter.commit(*self._held.joined())
        self._held.clear()


class Told:
    """What the policy tells the device, by way of a ring of the host's memory.

    sizes: [S] int32; factor: [15, 3] and seconds: [S] float32, as ops.tree_choose takes them
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._all = torch.zeros(CELLS + len(sizes), device=device)
        self.factor, self.seconds = self._all[:CELLS].view(-1, KINDS), self._all[CELLS:]
        self._ring = torch.zeros(SLOTS, len(self._all), pin_memory=device.type == "cuda")
        self._next = 0

    def send(self, values: Tensor) -> None:
        self._next = (self._next + 1) % SLOTS
        self._all.copy_(self._ring[self._next].copy_(values), non_blocking=True)


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
