"""A drafter that is told the true continuation: an upper bound, and a test of every tree shape.

With accuracy below 1 it ranks the true token first with that probability at each depth, else
somewhere below, or leaves it out. Its noise is a hash of the position, so it is the same anywhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree.checks import real, whole
from kdtree.drafters.base import Setup, Stateless, grow, nodes_of
from kdtree.state import State
from kdtree.tree import MAX_DEPTH, MAX_NODES, TokenTree


@dataclass(frozen=True, slots=True)
class OracleConfig:
    """truth: prompt and continuation, of each completion of the call in order
    accuracy: how often the true token is ranked first; candidates, depth: of the proposal
    seed: of the noise; budget: nodes of a tree where the engine names none"""

    truth: tuple[tuple[int, ...], ...]
    accuracy: float = 1.0
    candidates: int = 4
    depth: int = 7
    seed: int = 0
    budget: int = 7

    def create(self, setup: Setup) -> "Oracle":
        real("accuracy", self.accuracy, "in [0, 1]", lambda v: 0 <= v <= 1)
        whole("candidates", self.candidates, 1, 64)
        whole("depth", self.depth, 1, MAX_DEPTH)
        whole("budget", self.budget, 0, MAX_NODES - 1)
        return Oracle(self, setup)


class Oracle(Stateless):
    """truth: [B, max_seq_len + 16] int64, by position"""

    def __init__(self, config: OracleConfig, setup: Setup):
        self.config, self.setup = config, setup
        self.nodes = nodes_of(setup, config.budget, config.depth)
        self.candidates = min(config.candidates, setup.vocab)
        right = min(max(config.accuracy, 1 / (1 + self.candidates)), 0.98)
        self.first, self.other = math.log(right), math.log((1 - right) / self.candidates)
        shape = (setup.sequences, setup.max_seq_len + MAX_DEPTH + 1)
        self.truth = torch.zeros(shape, dtype=torch.int64, device=setup.device)

    @property
    def kind(self) -> str:
        return f"Oracle({self.candidates}, {self.config.depth})"

    def start(self, b: int, request: int, prompt: list[int]) -> None:
        if request >= len(self.config.truth):
            known = len(self.config.truth)
            raise ValueError(f"the oracle knows {known} completions, asked for number {request}")
        truth = list(self.config.truth[request])[: self.truth.shape[1]]
        if truth[: len(prompt)] != prompt:
            raise ValueError(f"the oracle's truth {request} does not begin with the prompt")
        for token in truth:
            whole("truth", token, 0, self.setup.vocab - 1)
        self.truth[b] = 0
        self.truth[b, : len(truth)] = torch.tensor(truth)

    def propose(self, state: State) -> TokenTree:
        c, M = self.config, self.candidates
        depth = torch.arange(c.depth, device=self.truth.device)
        position = state.length[:, None].long() + depth  # [B, J]
        true = self.truth.gather(1, position.clamp(max=self.truth.shape[1] - 1))
        missed = _noise(position, c.seed) >= c.accuracy
        rank = (1 + _noise(position, c.seed + 1) * M).long() * missed  # M: left out

        m = torch.arange(M, device=true.device)
        at = rank[..., None]
        wrong = (true[..., None] + 1 + torch.where(m < at, m, m - 1)) % self.setup.vocab
        candidate = torch.where(m == at, true[..., None], wrong)
        spread = 1 + _noise(position, c.seed + 2).float()[..., None]
        score = torch.where(m == 0, self.first, self.other * spread - 0.1 * m.float())
        return grow(state, score, candidate, self.nodes, self.setup)


def _noise(position: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), float64, by integer hashing alone. position: int64"""
    mask = 2**31 - 1
    x = (position + 1) * 0x9E3779B1 + (seed % mask) * 0x85EBCA6B
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 15)) & mask) * factor
    return ((x >> 16) & 0xFFFFFF).double() / 2**24
