"""What a round costs by the size of its tree."""

from collections.abc import Mapping
from dataclasses import dataclass

from kdtree.checks import real, whole
from kdtree.tree import MAX_NODES

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # N of the trees that may be asked for


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a round.

    rounds: of all but the draft, by N; 1 is plain decoding and must be there
    draft: of a draft, and of the choice
    """

    rounds: Mapping[int, float]
    draft: float = 0.0

    def __post_init__(self):
        if 1 not in self.rounds:
            raise ValueError(f"rounds has the sizes {sorted(self.rounds)}, wants 1 among them")
        for nodes, seconds in self.rounds.items():
            whole("rounds", nodes, 1, MAX_NODES)
            real(f"rounds[{nodes}]", seconds, "above 0", lambda v: v > 0)
        real("draft", self.draft, "of at least 0", lambda v: v >= 0)


def sizes_up_to(nodes: int) -> list[int]:
    """The sizes to choose among for trees of at most so many nodes; that itself is one."""
    return [*(size for size in SIZES if size < nodes), nodes]
