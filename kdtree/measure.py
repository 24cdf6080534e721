"""The costs of rounds, measured on the engine's own model and drafter, or by one like it."""

import statistics
import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from kdtree import costs_cache, ops
from kdtree.budget import AutoBudget
from kdtree.cache import KvCache
from kdtree.costs import Costs, sizes_up_to
from kdtree.drafters import Drafter, Setup
from kdtree.graphs import Graphs
from kdtree.record import to_host
from kdtree.sampling import SamplingParams
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, Path, TokenTree
from kdtree.verify import verify

CANDIDATES = 16  # of a depth of the trees that are timed
REPEATS = 7  # of each size, where the time allows
TURNS = 4  # of plain rounds and of rounds with a draft, where there is room
IN_TURN = 3  # rounds, of which the first is not timed
TEXT_SECONDS, TREE_SECONDS = 0.4, 1.0  # that measuring may take, but for one round of each size
TEXT = 8  # tokens that are written in any case, where there is room: half are a tree's depth
USUAL = 8  # nodes of the tree with which a draft is timed
# Costs are kept where so many times of each kind were taken, and their median is not more than so
# many times the least of them.
ALIKE, CALM = 3, 1.25


def automatic(
    drafter: Drafter,
    budget: Costs | str,
    setup: Setup,
    remeasure: bool,
    model: nn.Module,
    cache: KvCache,
    state: State,
    cuda_graphs: bool,
) -> Drafter:
    """The drafter cut by Costs, or by what is measured or, unless it is to be measured anew, was
    measured before; itself where it has nothing to cut."""
    if drafter.nodes == 1:
        return drafter
    if isinstance(budget, Costs):
        return AutoBudget(drafter, budget)
    key = costs_cache.key(
        setup.device,
        model.state_dict().items(),
        model=str(setup.target),
        dtype=str(setup.dtype),
        latents=str(cache.data.dtype),
        drafter=drafter.kind,
        nodes=drafter.nodes,
        chain=setup.chain,
        chain_seed=setup.chain_seed,
        sequences=setup.sequences,
        max_seq_len=setup.max_seq_len,
        cuda_graphs=cuda_graphs,
    )
    costs = None if remeasure else costs_cache.read(key, sizes_up_to(drafter.nodes))
    if costs is None:
        costs, calm = measure(model, cache, state, drafter, cuda_graphs)
        if calm:
            costs_cache.write(key, costs)
    return AutoBudget(drafter, costs, timed=True)


def measure(
    model: nn.Module, cache: KvCache, state: State, drafter: Drafter, cuda_graphs: bool
) -> tuple[Costs, bool]:
    """The costs of rounds, by the sizes that the drafter's trees may be cut to, in about 2 s; and
    whether the machine was calm meanwhile, so that they will be the same another time.

    The context is short. The trees are of the model's own making, and as a good drafter's would be:
    siblings share experts. The drafter is new; what it and the cache held is lost.
    cuda_graphs: whether the rounds to come are replayed, so that these are
    """
    sizes = sizes_up_to(drafter.nodes)
    with torch.no_grad():
        graphs = Graphs(cache.data.device, cuda_graphs)
        rounds = _Rounds(model, cache, state.max_seq_len, drafter, graphs)
        tree = rounds.write(drafter.nodes)
        usual = next(size for size in sizes if size >= min(USUAL, sizes[-1]))
        whole = rounds.in_turns(usual)
        took = {size: [] for size in sizes}
        for size in sizes + sizes:  # the first two of a size may build something
            rounds.again(tree, size)
        end = time.perf_counter() + TREE_SECONDS
        for _ in range(REPEATS):
            for size in sizes:
                took[size].append(rounds.again(tree, size))
            if time.perf_counter() > end:
                break
        cache.context.zero_()
    least = {size: min(each) for size, each in took.items()}
    alike = [times for times in (*took.values(), *whole) if times]
    calm = all(len(x) >= ALIKE and statistics.median(x) < CALM * min(x) for x in alike)
    # None costs more than a larger one: what seems to was disturbed, or can be padded to that.
    least = {size: min(least[n] for n in sizes if n >= size) for size in sizes}
    if not all(whole):
        return Costs(least), calm
    # What trees cost by size is of rounds of one tree again and again; a draft's cost makes up for
    # what that hides: where text goes on, neither model finds its weights where it left them.
    plain, drafted = map(statistics.median, whole)
    costs = {size: plain * seconds / least[1] for size, seconds in least.items()}
    draft = drafted - costs[usual]
    return Costs(costs, max(draft, 0.0)), calm and draft > 0


class _Rounds:
    """Rounds that nobody asked for, of all sequences at once, in a state of their own."""

    def __init__(
        self,
        model: nn.Module,
        cache: KvCache,
        max_seq_len: int,
        drafter: Drafter,
        graphs: Graphs,
    ):
        self.model, self.cache, self.drafter, self.graphs = model, cache, drafter, graphs
        sequences = cache.context.shape[0]
        self.state = State(sequences, max_seq_len, cache.context.device)
        for b in range(sequences):  # each its own text, so that it takes its own experts
            root = (1 + b) * 7919 % model.config.vocab
            self.state.start(b, [root], SamplingParams(), [])
        self.cache.context.zero_()
        self.room = max_seq_len - 1
        self.context = 0  # that `again` begins from

    def run(
        self, key: Hashable | None, propose: Callable[[], TokenTree], drafter: Drafter | None = None
    ) -> tuple[Tensor, Path, Tensor | None]:
        """A round, to its record on the host: the logits of its nodes, its path and taps.

        key: of its graph, or None; drafter: who commits it in the round
        """
        self.state.active.fill_(True)

        def round() -> tuple[Tensor, Path, Tensor | None, Tensor]:
            tree = propose()
            step = self.cache.place(tree)
            hidden, taps = self.model(step, self.cache, self.drafter.taps)
            logits = self.model.logits(hidden)
            path = verify(tree, step, logits, self.state.sampling)
            self.cache.commit(path)
            if drafter is not None:
                drafter.commit(path, taps)
            return logits, path, taps, self.state.commit(path)

        *outcome, record = round() if key is None else self.graphs(key, round)
        to_host(record)
        return tuple(outcome)

    def root(self) -> TokenTree:
        return TokenTree.root(self.state.token, self.state.active, self.state.length)

    def again(self, tree: TokenTree, size: int) -> float:
        """Seconds of a round with this tree's first nodes after the same context."""
        self.cache.context.fill_(self.context)
        self.state.length.fill_(1 + self.context)
        began = time.perf_counter()
        self.run(("again", size), lambda: tree.first(size))
        return time.perf_counter() - began

    def write(self, nodes: int) -> TokenTree:
        """Writes a greedy text, of which the drafter hears. Its first half is the context; of the
        second, the best-first tree by the model's own probabilities."""
        best, end = [], time.perf_counter() + TEXT_SECONDS
        while len(best) < min(2 * MAX_DEPTH, max(self.room // 3, 1)):
            logits, path, taps = self.run("text", self.root)
            self.drafter.commit(path, taps)
            best.append(ops.top_logprobs(logits[:, 0], min(CANDIDATES, logits.shape[2])))
            if time.perf_counter() > end and len(best) >= TEXT:
                break
        self.context = len(best) // 2
        score, token = (torch.stack(x, 1) for x in zip(*best[self.context :], strict=True))
        root = self.state.token[:, self.context].contiguous()
        score, token = score[:, :MAX_DEPTH].contiguous(), token[:, :MAX_DEPTH].contiguous()
        return TokenTree.build(score, token, root, nodes - 1, False)

    def in_turns(self, size: int) -> tuple[list[float], list[float]]:
        """Seconds of plain rounds and of some with a draft, cut to this size; the text goes on.
        None of them where there is no room."""
        took = [], []
        for _ in range(TURNS):
            for of, times in zip((None, size), took, strict=True):
                each = [self.whole(of) for _ in range(IN_TURN) if self._left() > MAX_DEPTH]
                times += filter(None, each[1:])
        return took

    def whole(self, size: int | None) -> float | None:
        """Seconds of a round as the engine has them, with a draft cut to this size, or None without
        one; None of the first ones, which build something."""
        began = time.perf_counter()
        key = self.drafter.plan(self.state)
        self.run(
            None if key is None else ("whole", size, key),
            (lambda: self.drafter.propose(self.state).first(size)) if size else self.root,
            self.drafter,
        )
        return time.perf_counter() - began if self.graphs.steady else None

    def _left(self) -> int:
        return self.room - int(self.state.length.max())
