"""What a draft tree's nodes are worth: how often drafts come true, beside how often they claim to.

All of it on the host, after the round, and in plain loops: trees are too small for arrays.
"""

from math import exp, isnan

from kdtree.tree import MAX_DEPTH

PRIOR = 1.0  # drafts as good as claimed that are counted before any is seen
POOLED = 3.0  # drafts of a depth that count as much as those of all depths
FADE, FORGET = 0.03, 0.002  # of a count, by a draft that adds to it, and by one in any case
KINDS = 3  # of nodes: on the spine, beside it, below what is beside it
CELLS = MAX_DEPTH * KINDS


class Calibration:
    """claimed, accepted: [15 * 3], mass of the nodes whose parent was accepted, older rounds
    counting less"""

    def __init__(self):
        self.claimed, self.accepted = [0.0] * CELLS, [0.0] * CELLS

    def observe(
        self, parent: list[list[int]], score: list[list[float]], path: list[list[int]]
    ) -> None:
        """Counts what became of trees' nodes, by sequence: of those alone whose parent was walked.

        parent, score: [B][N], of TokenTree; path: [B][J], the nodes walked, then -1
        """
        claimed, accepted = [0.0] * CELLS, [0.0] * CELLS
        for above_each, scores, walked in zip(parent, score, path, strict=True):
            children = {node: [] for node in walked if node >= 0}
            for n, above in enumerate(above_each):
                if above in children:
                    children[above].append(n)
            on_spine = True
            for depth, (above, those) in enumerate(children.items()):
                for n in those:
                    cell = depth * KINDS + ((n != those[0]) if on_spine else 2)
                    chance = exp(min(scores[n] - scores[above], 0.0))
                    if isnan(chance):
                        continue
                    claimed[cell] += chance
                    accepted[cell] += n in children
                on_spine = on_spine and bool(those) and those[0] in children
        left = [1 - FORGET - FADE * min(mass, 1.0) for mass in claimed]
        for count, seen in (self.claimed, claimed), (self.accepted, accepted):
            count[:] = [x * k + new for x, k, new in zip(count, left, seen, strict=True)]

    def factor(self) -> list[float]:
        """Accepted over claimed: [15 * 3], as ops.tree_choose takes it. What a kind has shown at
        all depths is what is expected where a depth has shown little."""
        factor = [0.0] * CELLS
        for kind in range(KINDS):
            claimed, accepted = self.claimed[kind::KINDS], self.accepted[kind::KINDS]
            share = POOLED * (sum(accepted) + PRIOR) / (sum(claimed) + PRIOR)
            each = zip(claimed, accepted, strict=True)
            factor[kind::KINDS] = [(a + share) / (c + POOLED) for c, a in each]
        return factor
