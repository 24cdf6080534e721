"""Prompt look-up: what followed the last few tokens, where they stood before. No training.

The continuations of several matches form a tree: where two begin alike they share nodes.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
        rank = torch.arange(self.matches, device=setup.device)
        self.first = FIRST + RANK * rank.float()
        self.earlier = rank[:, None] > rank  # [m, m']: m' ranks before m

    def propose(self, state: State) -> TokenTree:
        candidate, known = self._continuations(state)
        score = self._edges(candidate, known)
        return grow(state, score, candidate.transpose(1, 2).contiguous(), self.nodes, self.setup)

    def _continuations(self, state: State) -> tuple[Tensor, Tensor]:
        """Tokens [B, M, J] after the best matches, and which of them are known. Best: the longest,
        the latest among equals."""
        c, history = self.config, state.token
        if history.device.type == "cpu":  # elsewhere the host does not know how much there is
            history = history[:, : max(int(state.length.max()), self.matches)]
        index = torch.arange(history.shape[1], device=history.device)
        last = (state.length - 1)[:, None]
        same = torch.ones_like(history, dtype=torch.bool)
        matched = torch.zeros_like(history)  # tokens that agree, backwards from each index
        for back in range(c.length):
            token = history.gather(1, (last - back).clamp(min=0).long())
            same = same & (history.roll(back, 1) == token) & (index >= back) & (last >= back)
            matched += same
        earlier = (matched > 0) & (index < last)
        key = torch.where(earlier, matched * history.shape[1] + index, -1)
        key, end = key.topk(self.matches, dim=1)
        follow = end[..., None] + 1 + torch.arange(c.depth, device=history.device)
        known = (follow <= last[..., None]) & (key >= 0)[..., None]
        follow = follow.clamp(max=history.shape[1] - 1)
        return history.gather(1, follow.flatten(1)).view(follow.shape), known

    def _edges(self, candidate: Tensor, known: Tensor) -> Tensor:
        """Edge scores [B, J, M, M]: a node of the tree is the first match that has its prefix."""
        alike = (candidate[:, :, None] == candidate[:, None]) & known[:, :, None] & known[:, None]
        alike = alike.long().cumprod(-1).bool()  # [B, m, m', J]: same prefix up to this depth
        first = ~(alike & self.earlier[..., None]).any(2) & known  # [B, m, J]
        owner = torch.where(alike, 1, 0).argmax(2)  # [B, m, J]: the first match alike
        score = torch.full_like(alike, float("-inf"), dtype=torch.float32).permute(0, 3, 1, 2)
        score = score.contiguous()
        opens = first[..., 0]
        score[:, 0, 0] = torch.where(opens, self.first, float("-inf"))
        M, J = candidate.shape[1:]
        for j in range(1, J):
            parent = owner[..., j - 1]  # [B, m']
            entry = torch.full_like(score[:, j, 0], NEXT).masked_fill(~first[..., j], float("-inf"))
            score[:, j].scatter_(1, parent[:, None], entry[:, None])
        return score
