"""What a draft tree's nodes are worth: how often drafts come true, beside how often they claim to.

All of it on the host, after the round, and in plain loops: trees are too small for arrays.
"""

from dataclasses import dataclass
from math import exp

import numpy as np
from torch import Tensor

from kdtree.tree import MAX_DEPTH

PRIOR = 1.0  # drafts as good as claimed that are counted before any is seen
POOLED = 3.0  # drafts of a depth that count as much as those of all depths
FADE, FORGET = 0.03, 0.002  # of a count, by a draft that adds to it, and by one in any case
KINDS = 3  # of nodes: on the spine, beside it, below what is beside it
CELLS = MAX_DEPTH * KINDS


@dataclass(frozen=True, slots=True)
class Nodes:
    """A tree's nodes, as the calibration sees them, by sequence.

    parent: [B][N], -1 at the root, -2 at padding
    claim: [B][N], log of how likely the drafter says it is after its parent; 0 at the root
    cell: [B][N], of the calibration; 0 at the root
    """

    parent: list[list[int]]
    claim: list[list[float]]
    cell: list[list[int]]

    @staticmethod
    def of(parent: Tensor, depth: Tensor, score: Tensor) -> "Nodes":
        """On the host, [B, N] each."""
        rows = parent.tolist()
        read = [_of(*each) for each in zip(rows, depth.tolist(), score.tolist(), strict=True)]
        claims, cells = zip(*read, strict=True)
        return Nodes(rows, list(claims), list(cells))


def _of(parent: list[int], depth: list[int], score: list[float]) -> tuple[list[float], list[int]]:
    """Claims and cells of one tree. Of the nodes with the same parent the first is its best."""
    claim, kind, seen = [0.0] * len(parent), [0] * len(parent), set()
    for n, above in enumerate(parent):
        if above >= 0:
            claim[n] = min(score[n] - score[above], 0.0)
            kind[n] = 1 if above in seen and not kind[above] else 2 * (kind[above] > 0)
            seen.add(above)
    return claim, [max(d - 1, 0) * KINDS + k for d, k in zip(depth, kind, strict=True)]


class Calibration:
    """count: [2, 15 * 3], claimed and accepted mass of the nodes whose parent was accepted, older
    rounds counting less"""

    def __init__(self):
        self.count = np.zeros((2, CELLS))

    def observe(self, nodes: Nodes, path: list[list[int]]) -> None:
        """Counts what became of a tree's nodes. path: [B][J], the nodes walked, then -1"""
        seen = np.zeros((2, CELLS))
        each = zip(nodes.parent, nodes.claim, nodes.cell, path, strict=True)
        for parent, claim, cell, walked in each:
            for n, above in enumerate(parent):
                if above >= 0 and above in walked:
                    seen[0, cell[n]] += exp(claim[n])
                    seen[1, cell[n]] += n in walked
        self.count *= 1 - FORGET - FADE * seen[0].clip(max=1)
        self.count += seen

    def factor(self) -> np.ndarray:
        """Accepted over claimed: [15, 3], as ops.tree_choose takes it. What a kind has shown at all
        depths is what is expected where a depth has shown little."""
        claimed, accepted = self.count.reshape(2, MAX_DEPTH, KINDS)
        kind = (accepted.sum(0) + PRIOR) / (claimed.sum(0) + PRIOR)
        return (accepted + POOLED * kind) / (claimed + POOLED)
