"""No drafter: trees of one node, which is plain autoregressive decoding."""

from dataclasses import dataclass

from kdtree.drafters.base import Setup, Stateless
from kdtree.state import State
from kdtree.tree import TokenTree


@dataclass(frozen=True, slots=True)
class NoneConfig:
    """Nothing to fill in."""

    def create(self, setup: Setup) -> "NoDraft":
        if setup.budget:
            raise ValueError(f"budget is {setup.budget}, but the drafter 'none' proposes nothing")
        return NoDraft()


class NoDraft(Stateless):
    """Trees of the root alone."""

    nodes = 1

    def propose(self, state: State) -> TokenTree:
        return TokenTree.root(state.token, state.active, state.length)
