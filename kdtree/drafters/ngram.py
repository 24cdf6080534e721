"""Prompt look-up: what followed the last few tokens, where they stood before. No training.

The continuations of several matches form a tree: where two begin alike they share nodes.
"""

import math
from dataclasses import dataclass

from kdtree import ops
from kdtree.checks import whole
from kdtree.drafters.base import Setup, Stateless, grow, nodes_of
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, MAX_NODES, TokenTree


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """length: tokens of the longest match looked for; matches: continuations kept;
    depth: tokens of each; budget: nodes of a tree where the engine names none."""

    length: int = 3
    matches: int = 4
    depth: int = 7
    budget: int = 7

    def create(self, setup: Setup) -> "Ngram":
        whole("length", self.length, 1, 64)
        whole("matches", self.matches, 1, 64)
        whole("depth", self.depth, 1, MAX_DEPTH)
        whole("budget", self.budget, 0, MAX_NODES - 1)
        return Ngram(self, setup)


FIRST = math.log(0.5)  # a match's first token is right about half the time
NEXT = math.log(0.8)  # and each later one, where the one before it was, more often
RANK = math.log(0.7)  # an older or shorter match is a weaker one


class Ngram(Stateless):
    """Looks up every round anew, in the tokens that the state knows."""

    def __init__(self, config: NgramConfig, setup: Setup):
        self.config, self.setup = config, setup
        self.nodes = nodes_of(setup, config.budget, config.depth)
        self.matches = min(config.matches, setup.max_seq_len)

    @property
    def kind(self) -> str:
        return str(self.config)

    def propose(self, state: State) -> TokenTree:
        c, known = self.config, (state.token, state.length)
        candidate, score = ops.ngram_match(
            *known, c.length, self.matches, c.depth, FIRST, NEXT, RANK
        )
        return grow(state, score, candidate, self.nodes, self.setup)
