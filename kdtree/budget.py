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
from kdtree.calibration import CELLS, KINDS
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
        self.kind, self.taps, self.nodes = drafter.kind, drafter.taps, drafter.nodes
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
            self._told.send(self.policy)
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

    def commit(self, path: Path, taps: Tensor | None) -> tuple[Tensor, ...] | None:
        if not self._drafts:
            self._held.add(path, taps)
            return None
        self.drafter.commit(path, taps)
        tree, size = self._tree, self._size
        ends = self._drafted.expected[: size : max(size - 1, 1)]  # of one node, and of all
        return tree.parent, tree.score, path.node, ends.expand(len(path.length), -1)

    def learn(self, landed: Landed, steady: bool) -> None:
        N, told, emitted = landed.nodes, landed.told, landed.emitted
        if not any(each.token_ids for each in emitted):
            return  # all had ended, or failed
        drafted = bool(told[0])
        if drafted:
            scored, walked = 2 * N, 2 * N + min(N, MAX_DEPTH + 1)
            self.policy.calibration.observe(
                parent=[row[:N] for row in told],
                score=[floats(row[N:scored]) for row in told],
                path=[row[scored:walked] for row in told],
            )
            ends = floats(told[0][walked:])
            brought = sum(each.accepted + 1 for each in emitted)
            self.policy.learn(N, brought, promised=ends[-1], plain=ends[0])
        self.policy.see([each.logprobs for each in emitted])
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
    """What the policy tells the device, on CUDA by way of a ring of the host's memory.

    sizes: [S] int32; factor: [15, 3] and seconds: [S] float32, as ops.tree_choose takes them
    """

    def __init__(self, sizes: tuple[int, ...], device: torch.device):
        cuda = device.type == "cuda"
        self.sizes = torch.tensor(sizes, dtype=torch.int32, device=device)
        self._ring = torch.zeros(SLOTS if cuda else 1, CELLS + len(sizes), pin_memory=cuda)
        self._all = self._ring[0].to(device)  # on a CPU the ring itself
        self.factor, self.seconds = self._all[:CELLS].view(-1, KINDS), self._all[CELLS:]
        self._host, self._next = self._ring.numpy(), 0

    def send(self, policy: Policy) -> None:
        self._next = (self._next + 1) % len(self._ring)
        self._host[self._next] = policy.told()
        if self._all.is_cuda:
            self._all.copy_(self._ring[self._next], non_blocking=True)


class Held:
    """Rounds of one node each, as the one path that they make.

    rounds: how many, which the host counts; sequences: B, 0 until something is held
    On CUDA, where every replay of a graph writes the same tensors, they are put one after another
    where the device has counted to; on a CPU they are kept as they are.
    """

    def __init__(self):
        self.rounds = self.sequences = 0
        self._each: list[tuple[Path, Tensor | None]] = []  # on a CPU
        self._all: list[Tensor | None] = []  # on CUDA: parts of all, [B, HELD, ...]
        self._at: Tensor | None = None  # [1] int64, the device's count

    def add(self, path: Path, taps: Tensor | None) -> None:
        """One more, which the host has counted already."""
        self.sequences = len(path.length)
        if not path.length.is_cuda:
            self._each.append((path, taps))
            return
        parts = _parts(path, taps)
        if self._at is None:
            self._at = torch.zeros(1, dtype=torch.int64, device=path.length.device)
            self._all = [
                x if x is None else x.new_zeros((len(x), HELD, *x.shape[2:])) for x in parts
            ]
        for mine, its in zip(self._all, parts, strict=True):
            if mine is not None:
                mine.index_copy_(1, self._at, its)
        self._at += 1

    def joined(self) -> tuple[Path, Tensor | None]:
        """All of them as the one path that they make. A sequence that ended stays so."""
        if self._each:
            each = zip(*(_parts(*one) for one in self._each), strict=True)
            parts = [None if x[0] is None else torch.cat(x, 1) for x in each]
        else:
            parts = [x if x is None else x[:, : self.rounds].contiguous() for x in self._all]
        token, logprob, lengths, failed, taps = parts
        length = lengths.sum(1, dtype=torch.int32)
        n = torch.arange(token.shape[1], dtype=torch.int32, device=token.device)
        node = torch.where(n < length[:, None], n, -1)
        return Path(node, length, token, logprob, failed[:, -1].contiguous()), taps

    def clear(self) -> None:
        self.rounds = 0
        if self._at is not None:
            self._at.zero_()
        else:
            self._each.clear()
            self.sequences = 0


def _parts(path: Path, taps: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of a round of one node: [B, 1, ...] each."""
    return path.token, path.logprob, path.length[:, None], path.failed[:, None], taps
