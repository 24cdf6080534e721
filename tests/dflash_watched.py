"""A DFlash drafter whose every block is kept, while the trees are its own or another drafter's."""

from dataclasses import dataclass, field

import torch

from kdtree import DflashConfig


@dataclass(frozen=True)
class Watched:
    """trees: the config of the drafter that proposes, or None for DFlash itself."""

    config: DflashConfig
    trees: object = None
    made: list = field(default_factory=list, compare=False)

    def create(self, setup):
        trees = self.trees.create(setup) if self.trees else None
        self.made.append(Watcher(self.config.create(setup), trees))
        return self.made[-1]


class Watcher:
    """rounds: (sequence, its completion, committed tokens, hidden [J, D], logits [J, W]) each."""

    kind, replans = "watched", False

    def __init__(self, drafter, trees):
        self.drafter, self.trees = drafter, trees
        self.nodes = (trees or drafter).nodes
        self.rounds, self.request = [], {}

    @property
    def taps(self):
        return self.drafter.taps

    def bind(self, model):
        self.drafter.bind(model)

    def start(self, b, request, prompt):
        self.request[b] = request
        for each in filter(None, (self.drafter, self.trees)):
            each.start(b, request, prompt)

    def prefill(self, b, taps):
        self.drafter.prefill(b, taps)

    def plan(self, state):
        return None  # it asks the host

    def propose(self, state):
        hidden, logits = self.drafter.draft(state)
        length, active = self.drafter.cache.length.tolist(), state.active.tolist()
        for b, known in enumerate(state.length.tolist()):
            if active[b]:
                assert length[b] == known - 1, "the cache holds what is committed"
                kept = hidden[b].double().cpu(), logits[b].double().cpu()
                self.rounds.append((b, self.request[b], length[b], *kept))
        return (self.trees or self.drafter).propose(state)

    def commit(self, path, taps):
        self.drafter.commit(path, taps)

    def by_length(self, request=None) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Of one completion, or of all: (hidden, logits) by committed tokens."""
        return {n: kept for _, r, n, *kept in self.rounds if request in (None, r)}
