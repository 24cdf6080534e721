"""What a draft tree's nodes are worth: how often drafts come true, beside how often they claim to.

All of it on the host, from one read a tree.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kdtree.record import to_host
from kdtree.tree import MAX_DEPTH, TokenTree

PRIOR = 1.0  # drafts as good as claimed that are counted before any is seen
POOLED = 3.0  # drafts of a depth that count as much as those of all depths
FADE, FORGET = 0.03, 0.002  # of a count, by a draft that adds to it, and by one in any case
KINDS = 3  # of nodes: on the spine, beside it, below what is beside it


@dataclass(frozen=True, slots=True)
class Nodes:
    """A tree's nodes, as the calibration sees them.

    parent: [B, N] int, -1 at the root, -2 at padding
    claim: [B, N] float, log of how likely the drafter says it is after its parent; 0 at the root
    lineage: [B, N, N] bool, whether m is n's ancestor or n itself
    cell: [B, N] int, of the calibration
    """

    parent: np.ndarray
    claim: np.ndarray
    lineage: np.ndarray
    cell: np.ndarray

    @staticmethod
    def of(tree: TokenTree) -> "Nodes":
        """Here the host waits."""
        each = tree.parent, tree.depth, tree.score.view(torch.int32), tree.ancestors
        packed = to_host(torch.cat([x.view(torch.int32) for x in each], 1)).numpy()
        N = tree.parent.shape[1]
        parent, depth, score = packed[:, :N], packed[:, N : 2 * N], packed[:, 2 * N : 3 * N]
        ancestors = np.ascontiguousarray(packed[:, 3 * N :]).view(np.int64)
        score = score.view(np.float32)
        drafted, above, n = parent >= 0, parent.clip(0), np.arange(N)
        claim = score - np.take_along_axis(score, above, 1)
        claim = np.where(drafted, claim, 0).clip(max=0)
        lineage = (ancestors[..., None] >> n & 1).astype(bool)
        # Not its parent's best child: an earlier node has the same parent.
        later = ((parent[..., None] == parent[:, None]) & (n[:, None] > n)).any(2)
        beside = (lineage & later[:, None]).any(2)
        kind = beside + np.take_along_axis(beside, above, 1).astype(int)
        return Nodes(parent, claim, lineage, (depth - 1).clip(0) * KINDS + kind)

    def first(self, size: int) -> "Nodes":
        n = slice(size)
        return Nodes(self.parent[:, n], self.claim[:, n], self.lineage[:, n, n], self.cell[:, n])


class Calibration:
    """count: [2, 15 * 3], claimed and accepted mass of the nodes whose parent was accepted, older
    rounds counting less"""

    def __init__(self):
        self.count = np.zeros((2, MAX_DEPTH * KINDS))

    def expected(self, nodes: Nodes) -> np.ndarray:
        """Tokens that a round with a tree of the first n nodes is expected to emit, of all
        sequences together: [N], that of n = 1 first."""
        drafted = nodes.parent >= 0
        step = np.where(drafted, (nodes.claim + self._factor()[nodes.cell]).clip(max=0), 0)
        chance = np.exp((nodes.lineage @ step[..., None])[..., 0]) * drafted
        return chance.sum(0).cumsum() + (nodes.parent[:, 0] == -1).sum()

    def observe(self, nodes: Nodes, path: np.ndarray) -> None:
        """Counts what became of a tree's nodes. path: [B, J], the nodes walked, then -1"""
        B, N = nodes.parent.shape
        walked = np.zeros((B, N + 1), bool)  # one beyond takes the padding
        np.put_along_axis(walked, np.where(path < 0, N, path), True, 1)
        walked = walked[:, :N]
        offered = np.take_along_axis(walked, nodes.parent.clip(0), 1) & (nodes.parent >= 0)
        cell = nodes.cell[offered]
        cells = self.count.shape[1]
        claimed = np.bincount(cell, np.exp(nodes.claim[offered]), cells)
        accepted = np.bincount(cell, walked[offered], cells)
        self.count *= 1 - FORGET - FADE * claimed.clip(max=1)
        self.count += claimed, accepted

    def _factor(self) -> np.ndarray:
        """Log of accepted over claimed, by cell. What a kind has shown at all depths is what is
        expected where a depth has shown little: [15 * 3]."""
        claimed, accepted = self.count.reshape(2, MAX_DEPTH, KINDS)
        kind = (accepted.sum(0) + PRIOR) / (claimed.sum(0) + PRIOR)
        return np.log((accepted + POOLED * kind) / (claimed + POOLED)).ravel()
