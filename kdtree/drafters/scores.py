"""Scores: from a block drafter's logits to the candidates of each depth, ready for a tree.

For depth j (from 1), candidate v, the drafter's log-probability q, the target's own noise g for v
at that position, and the sequence's temperature t,

    x(v) = (a_j q(v) + b_j t g(v)) / (1 + c_j t)

and a candidate's score is its log-softmax over the vocabulary. At t = 0 that sharpens; above, it is
coupled to the draw that is to come, which the noise decides as much as the distribution: no output
depends on it, only how often a draft is right. With edges, q(b) + sum of weight_j e(a, b) takes q's
place where b follows a; a depth's candidates share the mass that they have without edges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kdtree import ops
from kdtree.checks import FLOAT_MAX
from kdtree.drafters.edges import Bigram, Selector
from kdtree.errors import ConfigError
from kdtree.state import State


@dataclass(frozen=True, slots=True)
class ScoresConfig:
    """The fitted numbers, one a depth; `selector` and `bigram` weight the edges of that name."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    selector: tuple[float, ...]
    bigram: tuple[float, ...]

    @staticmethod
    def from_hf(given: dict | None, depth: int) -> "ScoresConfig":
        """From `kdtree_scores` of a drafter's config.json; None, or a key that it lacks: untouched.

        depth: J, block_size - 1. Raises ConfigError on an unknown key, or a list that is not J
        finite numbers.
        """
        untouched = {"a": 1.0, "b": 1.0, "c": 0.0, "selector": 1.0, "bigram": 0.0}
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise ConfigError(f"kdtree_scores is {given!r:.40}, wants an object")
        if unknown := sorted(set(given) - set(untouched)):
            supported = ", ".join(untouched)
            raise ConfigError(f"kdtree_scores has {', '.join(unknown)}, supported: {supported}")
        values = {
            name: _numbers(f"kdtree_scores.{name}", given[name], depth)
            if given.get(name) is not None
            else (default,) * depth
            for name, default in untouched.items()
        }
        for name, least in (("a", 0.0), ("c", 0.0)):
            if min(values[name]) < least:
                raise ConfigError(
                    f"kdtree_scores.{name} holds {min(values[name])}, wants 0 or more"
                )
        return ScoresConfig(**values)


class Scorer:
    """Candidates and their scores, on the device, without a host sync.

    candidates: M, at most 64; selector, bigram: edges, where there are any
    """

    def __init__(
        self,
        config: ScoresConfig,
        candidates: int,
        device: torch.device,
        selector: Selector | None = None,
        bigram: Bigram | None = None,
    ):
        self.candidates = candidates
        every = (getattr(config, field.name) for field in fields(config))
        self.a, self.b, self.c, *weights = (torch.tensor(v, device=device) for v in every)
        # An edge with its weights by depth, or None.
        self.selector = (weights[0], selector) if selector and any(config.selector) else None
        self.bigram = (weights[1], bigram) if bigram and any(config.bigram) else None

    def __call__(self, logits: Tensor, hidden: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Score and candidate, as ops.tree_build takes them.

        logits: [B, J, V] float32, of the depths from 1; hidden: [B, J, D], what they are of
        returns [B, J, M] float32, or with edges [B, J, M, M], and [B, J, M] int64. Where logits
        or edges are not finite, no candidate has a score: -inf
        """
        J, s = logits.shape[1], state.sampling
        a, b, c = self.a[:J], self.b[:J], self.c[:J]
        y = ops.draft_logits(logits, state.length - 1, s.seed, s.temperature, a, b, c)
        best = ops.top_logprobs(y.flatten(0, 1), min(self.candidates, y.shape[2]))
        score, candidate = (found.unflatten(0, y.shape[:2]) for found in best)
        if self.selector is None and self.bigram is None:
            return score.masked_fill(score.isnan(), -math.inf), candidate
        more, selector = None, ()
        if self.bigram is not None:
            weight, table = self.bigram
            more = table(logits, candidate, state) * weight[:J, None, None]
        if self.selector is not None:
            weight, books = self.selector
            selector = weight[:J], books.direction(hidden), books.predecessor, books.successor
        where = state.token, state.length
        moved = ops.edge_scores(score, candidate, *where, s.temperature, a, c, more, *selector)
        return moved, candidate


def _numbers(name: str, values: object, depth: int) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != depth:
        raise ConfigError(f"{name} is {values!r:.80}, wants a list of {depth} numbers")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= FLOAT_MAX:
            raise ConfigError(f"{name} holds {value!r:.40}, wants finite numbers")
    return tuple(map(float, values))
