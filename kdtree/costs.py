"""What a round costs by the size of its trees: measured on the engine's own model, or given."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.cache import KvCache
from kdtree.checks import real, whole
from kdtree.drafters import Drafter
from kdtree.record import to_host
from kdtree.sampling import SamplingParams
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, MAX_NODES, TokenTree
from kdtree.verify import verify

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # N of the trees that may be asked for
CANDIDATES = 16  # of a depth of the trees that are timed
REPEATS = 7  # of each size, where the time allows
TEXT_SECONDS, TREE_SECONDS = 0.4, 1.0  # that measuring may take, but for one round of each size


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a round.

    rounds: of all but the draft, by N; 1 is plain decoding and must be there
    draft: of a draft; None for the time that it is seen to take
    """

    rounds: Mapping[int, float]
    draft: float | None = None

    def __post_init__(self):
        if 1 not in self.rounds:
            raise ValueError(f"rounds has the sizes {sorted(self.rounds)}, wants 1 among them")
        for nodes, seconds in self.rounds.items():
            whole("rounds", nodes, 1, MAX_NODES)
            real(f"rounds[{nodes}]", seconds, "above 0", lambda v: v > 0)
        if self.draft is not None:
            real("draft", self.draft, "of at least 0", lambda v: v >= 0)


def sizes_up_to(nodes: int) -> list[int]:
    """The sizes to choose among for trees of at most so many nodes; that itself is one."""
    return [*(size for size in SIZES if size < nodes), nodes]


def measure(model: nn.Module, cache: KvCache, state: State, drafter: Drafter) -> Costs:
    """The costs of rounds, by the sizes that the drafter's trees may be cut to, in about 2 s.

    The context is short. The trees are of the model's own making, and as a good drafter's would be:
    siblings share experts. What the cache held is lost.
    """
    sizes = sizes_up_to(drafter.nodes)
    with torch.no_grad():
        rounds = _Rounds(model, cache, state.max_seq_len, drafter.taps)
        tree = rounds.tree(drafter.nodes)
        took = {size: [] for size in sizes}
        for size in sizes:  # the first of its size may build something
            rounds.run(tree.first(size))
        end = time.perf_counter() + TREE_SECONDS
        for _ in range(REPEATS):
            for size in sizes:
                took[size].append(rounds.seconds(tree.first(size)))
            if time.perf_counter() > end:
                break
        cache.context.zero_()
    least = {size: min(each) for size, each in took.items()}
    # None costs more than a larger one: what seems to was disturbed, or can be padded to that.
    return Costs({size: min(least[n] for n in sizes if n >= size) for size in sizes})


class _Rounds:
    """Rounds that nobody asked for, of all sequences at once."""

    def __init__(self, model: nn.Module, cache: KvCache, max_seq_len: int, taps: Sequence[int]):
        self.model, self.cache, self.taps = model, cache, taps
        sequences = cache.context.shape[0]
        self.state = State(sequences, max_seq_len, cache.context.device)
        for b in range(sequences):  # each its own text, so that it takes its own experts
            root = (1 + b) * 7919 % model.config.vocab
            self.state.start(b, [root], SamplingParams(), [])
        self.context = 0
        self.depth = min(MAX_DEPTH, max_seq_len - 1)

    def run(self, tree: TokenTree) -> Tensor:
        """A round from the context on, to its record on the host; the logits of its nodes."""
        self.cache.context.fill_(self.context)
        self.state.length.fill_(1 + self.context)
        self.state.active.fill_(True)
        step = self.cache.place(tree)
        hidden, _ = self.model(step, self.cache, self.taps)
        logits = self.model.logits(hidden)
        path = verify(tree, step, logits, self.state.sampling)
        self.cache.commit(path)
        to_host(self.state.commit(path))
        return logits

    def seconds(self, tree: TokenTree) -> float:
        began = time.perf_counter()
        self.run(tree)
        return time.perf_counter() - began

    def tree(self, nodes: int) -> TokenTree:
        """The best-first tree by the model's own probabilities along its greedy continuation; what
        it wrote before is the context."""
        best, end = [], time.perf_counter() + TEXT_SECONDS
        while len(best) < min(2 * self.depth, self.state.max_seq_len - 1):
            logits = self.run(TokenTree.root(self.state.root()))[:, 0]
            best.append(ops.top_logprobs(logits, min(CANDIDATES, logits.shape[1])))
            self.context += 1
            if time.perf_counter() > end and len(best) > 1:
                break
        written = len(best) // 2
        score, token = (torch.stack(each, 1) for each in zip(*best[written:], strict=True))
        self.context = written
        self.state.length.fill_(1 + written)
        score, token = score[:, :MAX_DEPTH], token[:, :MAX_DEPTH]
        return TokenTree.build(
            score.contiguous(), token.contiguous(), self.state.root(), nodes - 1, False
        )
