"""The drafters' protocol, and the tree that grows from what a drafter scored."""

import pathlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kdtree.config import ModelConfig
from kdtree.models import Deepseek
from kdtree.record import Landed
from kdtree.state import State
from kdtree.tree import Path, TokenTree


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine tells a drafter of itself.

    budget: nodes beside the root, or None for the drafter's own choice
    chain: grow a chain, no branches; chain_seed: insert the best chain first
    target: the model that the trees are for; directory: where it is
    device, dtype: where and as what the target's weights and activations are
    """

    budget: int | None
    chain: bool
    chain_seed: bool
    target: ModelConfig
    directory: pathlib.Path
    sequences: int
    max_seq_len: int
    device: torch.device
    dtype: torch.dtype

    @property
    def vocab(self) -> int:
        return self.target.vocab


class Drafter(Protocol):
    """kind: all that its drafts' time depends on, but the Setup and nodes
    taps: target layers whose output `prefill` and `commit` want; nodes: N of its trees, which
    may be set lower, and back, between rounds; replans: whether `plan` says another thing from
    round to round (a Replanner), or the same while a text goes on."""

    kind: str
    taps: tuple[int, ...]
    nodes: int
    replans: bool

    def bind(self, model: Deepseek) -> None:
        """The target is loaded: once, before anything else is asked of the drafter."""

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        """Sequence b begins anew with this prompt, of the call's completion number `request`."""

    def prefill(self, b: int, taps: Tensor | None) -> None:
        """A chunk of sequence b's prompt was committed. taps: [1, n, len(taps) * D] of its rows"""

    def plan(self, state: State) -> Hashable | None:
        """What the host decides of the round to come, before its tree is asked for.

        In rounds of equal plans `propose` and `commit` launch the same work on the same tensors, so
        that a CUDA graph may take their place; None where they have to be called. Sizes where the
        device decides the rest.
        """

    def propose(self, state: State) -> TokenTree:
        """A tree of N nodes for every sequence; padding where it is inactive."""

    def commit(self, path: Path, taps: Tensor | None) -> tuple[Tensor, ...] | None:
        """A round's path. taps: [B, N, len(taps) * D] of the proposed tree's nodes

        Rounds for which no tree was asked may come together, as the one path that they make: before
        the next tree or start, if at all; up to 128 nodes.
        returns what it wants to be told of the round on the host, [B, X] int32 or float32 each;
        or None
        """


@dataclass(frozen=True, slots=True)
class Sizes:
    """The plan of a round whose N the device chooses, among these. own: the rest of the plan"""

    sizes: tuple[int, ...]
    own: Hashable


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree of the most nodes, and which of the sizes it is to be cut to: choice [1] int32.

    expected: [N] float32, tokens that its first n + 1 nodes are thought to bring
    """

    tree: TokenTree
    choice: Tensor
    expected: Tensor


class Replanner(Drafter, Protocol):
    """A drafter that decides anew by what became of earlier rounds. Those that are on their way
    when it plans it does not know yet."""

    def draft(self, state: State) -> Drafted:
        """What goes before a round of Sizes."""

    def take(self, drafted: Drafted, size: int) -> None:
        """The next tree proposed is this one, cut to `size` nodes."""

    def learn(self, landed: Landed, steady: bool) -> None:
        """What became of a round. steady: whether others of its kind will take as long"""


@runtime_checkable
class DrafterConfig(Protocol):
    """What a user fills in; `create` makes the drafter of one engine from it."""

    def create(self, setup: Setup) -> Drafter:
        """Raises ValueError or ConfigError on a config that does not fit the setup."""


class Stateless:
    """What a drafter that keeps nothing between rounds shares."""

    taps: tuple[int, ...] = ()
    nodes: int
    replans = False

    @property
    def kind(self) -> str:
        return type(self).__name__

    def bind(self, model: Deepseek) -> None:
        pass

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        pass

    def prefill(self, b: int, taps: Tensor | None) -> None:
        pass

    def plan(self, state: State) -> Hashable | None:
        return self.nodes  # all else is decided on the device

    def commit(self, path: Path, taps: Tensor | None) -> None:
        pass


def nodes_of(setup: Setup, default: int, depth: int) -> int:
    """N of the trees: the root and the budget (or the default); of a chain, its depth at most."""
    budget = default if setup.budget is None else setup.budget
    return 1 + (min(budget, depth) if setup.chain else budget)


def grow(state: State, score: Tensor, candidate: Tensor, nodes: int, setup: Setup) -> TokenTree:
    """The tree of `nodes` nodes from a drafter's scores; score, candidate as in ops.tree_build.

    A chain is the tree that its seed fills.
    """
    seed = setup.chain or setup.chain_seed
    own = state.active, state.length
    return TokenTree.build(score, candidate, state.token, nodes - 1, seed, *own)
