"""A drafter without a model: logits by a fixed generator, that know the truth as well as asked."""

import functools
from dataclasses import dataclass

import torch

from kdtree.drafters.base import Stateless, grow, nodes_of
from kdtree.drafters.edges import Bigram, Selector
from kdtree.drafters.scores import Scorer, ScoresConfig
from kdtree.tree import MAX_DEPTH

HIDDEN, RANK = 8, 4


@functools.cache
def edges_of(vocab, device):
    """A selector and a bigram table of random numbers."""
    rng = torch.Generator().manual_seed(vocab)
    shapes = ((RANK, HIDDEN), (vocab, RANK), (vocab, RANK), (vocab, vocab))
    *selector, table = (torch.randn(shape, generator=rng).to(device) for shape in shapes)
    return Selector(*selector), Bigram(table.log_softmax(1).bfloat16())


@dataclass(frozen=True)
class ScoredConfig:
    """truth: of each completion; lead: of the true token's logit over noise of deviation 1
    spoilt: share of the depths whose logits are not finite"""

    truth: tuple[tuple[int, ...], ...]
    depth: int = 7
    candidates: int = 6
    lead: float = 3.0
    edges: bool = True
    spoilt: float = 0.0
    fitted: dict | None = None

    def create(self, setup):
        return Scored(self, setup)


class Scored(Stateless):
    def __init__(self, config, setup):
        self.config, self.setup = config, setup
        self.nodes = nodes_of(setup, 7, config.depth)
        self.generator = torch.Generator().manual_seed(1)
        shape = (setup.sequences, setup.max_seq_len + MAX_DEPTH + 1)
        self.truth = torch.zeros(shape, dtype=torch.int64)
        scores = ScoresConfig.from_hf(config.fitted, config.depth)
        edges = edges_of(setup.vocab, setup.device) if config.edges else ()
        self.scorer = Scorer(scores, config.candidates, setup.device, *edges)

    def start(self, b, request, prompt):
        truth = self.config.truth[request][: self.truth.shape[1]]
        self.truth[b, : len(truth)] = torch.tensor(truth)

    def logits(self, state):
        position = state.length.cpu()[:, None] + torch.arange(self.config.depth)
        true = self.truth.gather(1, position.clamp(max=self.truth.shape[1] - 1))
        shape = (*true.shape, self.setup.vocab)
        logits = torch.randn(shape, generator=self.generator)
        logits.scatter_add_(2, true[..., None], torch.full((*true.shape, 1), self.config.lead))
        spoilt = torch.rand(true.shape, generator=self.generator) < self.config.spoilt
        bad = (float("nan"), float("inf"), -float("inf"))[int(position[0, 0]) % 3]
        return logits.masked_fill(spoilt[..., None], bad)

    def plan(self, state):
        return None  # it asks the host

    def propose(self, state):
        logits = self.logits(state).to(self.setup.device)
        shape = (*logits.shape[:2], HIDDEN)
        hidden = torch.randn(shape, generator=self.generator).to(logits)
        return grow(state, *self.scorer(logits, hidden, state), self.nodes, self.setup)
