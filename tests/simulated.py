"""Rounds without a model: trees by a drafter of known skill, and time by a table of costs."""

from collections import deque
from dataclasses import dataclass, field

import torch

from kdtree.budget import AutoBudget
from kdtree.costs import Costs
from kdtree.drafters.base import Stateless
from kdtree.record import Landed
from kdtree.request import Emitted
from kdtree.sampling import SamplingParams
from kdtree.state import RUNNING, State
from kdtree.tree import MAX_DEPTH, Path, TokenTree

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
FLAT = {n: 1 + 0.002 * n for n in SIZES}  # launches alone
CONVEX = {n: 1 + (n / 16) ** 2 for n in SIZES}
EXPERTS = {n: 0.3 + 5 * (1 - 0.975**n) for n in SIZES}  # concave: experts saturate
CLIFF = {n: 1.0 + 0.01 * n if n <= 8 else 3.0 + 0.01 * n for n in SIZES}  # a tile more
TABLES = {"flat": FLAT, "convex": CONVEX, "experts": EXPERTS, "cliff": CLIFF}


@dataclass
class Skill:
    """How often the drafter's candidates come true, by depth and by how they stand.

    claims: its own log-probabilities of a depth's candidates, best first
    spine: how often its best is right after the spine, of depth 1, and by what factor a depth more
    sibling: how often its second is right; below: its best after a sibling
    """

    spine: float
    fall: float = 0.95
    sibling: float = 0.1
    below: float = 0.3
    claims: tuple[float, ...] = (0.7, 0.15, 0.08, 0.04)
    depth: int = 7

    def chance(self, depth: int, rank: int, on_spine: bool) -> float:
        if rank == 0:
            return self.spine * self.fall ** (depth - 1) if on_spine else self.below
        return self.sibling if rank == 1 and on_spine else 0.0


class Drafting(Stateless):
    """Scores about the claims; tokens are ranks."""

    def __init__(self, skill: Skill, nodes: int, chain: bool, sequences: int = 1):
        self.skill, self.nodes, self.chain = skill, nodes, chain
        self.rng = torch.Generator().manual_seed(0)
        self.rank = torch.arange(len(skill.claims)).expand(sequences, skill.depth, -1).contiguous()
        self.drafts = 0

    def to(self, device: torch.device) -> "Drafting":
        self.rank = self.rank.to(device)
        return self

    def propose(self, state):
        self.drafts += 1
        claim = torch.tensor(self.skill.claims).log()
        score = claim * (0.7 + 0.6 * torch.rand(self.rank.shape, generator=self.rng))
        score, root = score.to(self.rank.device), torch.zeros_like(self.rank[:, 0, 0])
        return TokenTree.build(score, self.rank, root, self.nodes - 1, self.chain, state.active)


@dataclass
class Simulation:
    """Rounds of a drafter; seconds of them by the table."""

    drafter: object
    costs: dict[int, float]
    draft: float
    sequences: int = 1
    seconds: float = 0.0
    tokens: int = 0
    sizes: list[int] = field(default_factory=list)
    ahead: int = 0  # rounds that are under way before the drafter hears of one

    def __post_init__(self):
        self.flight = deque()
        self.state = State(self.sequences, 64, CPU)
        self.rng = torch.Generator().manual_seed(1)
        for b in range(self.sequences):
            self.state.start(b, [1], SamplingParams(), [])

    def run(self, rounds: int, skill: Skill) -> "Simulation":
        inner = getattr(self.drafter, "drafter", self.drafter)
        for _ in range(rounds):
            drafts = inner.drafts
            self.drafter.plan(self.state)
            tree = self.drafter.propose(self.state)
            size = tree.token.shape[1]
            took = self.costs[size] + self.draft * (inner.drafts - drafts)
            self.seconds += took
            self.sizes.append(size)
            walks = [self.walk(tree, b, skill) for b in range(self.sequences)]
            self.tokens += sum(map(len, walks))
            told = self.drafter.commit(path_of(walks, size), None)
            if self.drafter.replans:
                told = [x.view(torch.int32) for x in told or [torch.empty(self.sequences, 0)]]
                told = torch.cat(told, 1).tolist()
                emitted = [Emitted(w, [0.0] * len(w), RUNNING, size, len(w) - 1) for w in walks]
                self.flight.append(Landed(emitted, {"forward": self.seen(took)}, size, told))
                if len(self.flight) > self.ahead:
                    self.drafter.learn(self.flight.popleft(), steady=True)
        return self

    def seen(self, seconds: float) -> float:
        """What the clock says of a round that took so long."""
        return seconds

    def walk(self, tree: TokenTree, b: int, skill: Skill) -> list[int]:
        """The nodes of the path: of a node's children at most one is right."""
        token, parent, node, on_spine, path = (
            tree.token[b].tolist(),
            tree.parent[b].tolist(),
            0,
            True,
            [0],
        )
        while True:
            children = {token[n]: n for n in range(1, len(token)) if parent[n] == node}
            draw = float(torch.rand(1, generator=self.rng))
            for rank in range(len(skill.claims)):
                draw -= skill.chance(len(path), rank, on_spine)
                if draw < 0:
                    break
            if draw >= 0 or rank not in children:
                return path
            on_spine = on_spine and rank == 0
            node = children[rank]
            path.append(node)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def path_of(walks: list[list[int]], nodes: int) -> Path:
    width = min(nodes, MAX_DEPTH + 1)
    node = torch.tensor([w + [-1] * (width - len(w)) for w in walks], dtype=torch.int32)
    length = torch.tensor([len(w) for w in walks], dtype=torch.int32)
    return Path(node, length, node.long(), node.float(), length < 0)


def auto(skill, costs, draft, nodes=64, chain=False, sequences=1, ahead=0) -> Simulation:
    drafter = Drafting(skill, nodes, chain, sequences)
    budget = AutoBudget(drafter, Costs(costs, draft))
    return Simulation(budget, costs, draft, sequences, ahead=ahead)


def fixed(skill, costs, draft, nodes, chain=False, sequences=1) -> Simulation:
    return Simulation(Drafting(skill, nodes, chain, sequences), costs, draft, sequences)
