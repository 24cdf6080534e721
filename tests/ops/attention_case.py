"""Inputs of mla_attention: random trees over a paged cache in which everything unused is poison."""

from dataclasses import dataclass

import numpy as np
import torch
from fp8_rows import widened
from torch import Tensor

from kdtree import ops

WILD = 2147480000  # a block table entry that must not be followed


@dataclass
class Case:
    q: Tensor  # [B, N, H, C + R]
    cache: Tensor  # [pages, 64, C + R], NaN where no node sees it; or FP8, see fp8_rows.py
    block_table: Tensor  # [B, max_pages]
    context: Tensor  # [B]
    ancestors: Tensor | None  # [B, N]
    latent: int
    scale: float

    def run(self) -> Tensor:
        return ops.mla_attention(*vars(self).values())

    def to(self, device: torch.device) -> "Case":
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return Case(**moved)

    def slots(self, b: int, n: int) -> list[int]:
        """The token slots that node n of sequence b attends to, by position."""
        context = int(self.context[b])
        if self.ancestors is None:
            return list(range(context + n + 1))
        word = int(self.ancestors[b, n])
        ahead = [context + m for m in range(64) if word >> m & 1]
        return list(range(context)) + ahead if ahead else []

    def rows(self, b: int, slots: list[int]) -> tuple[Tensor, Tensor]:
        """Where in the cache token slots are: their pages, and their places there."""
        slot = torch.tensor(slots, dtype=torch.long)
        return self.block_table[b, slot // 64].long(), slot % 64

    def keys(self, b: int, slots: list[int]) -> np.ndarray:
        """[len(slots), C + R] float64"""
        rows = self.cache[self.rows(b, slots)]
        if rows.dtype == torch.uint8:
            rows = widened(rows, self.latent, self.q.shape[3] - self.latent)
        return rows.double().numpy()


def random_parents(N: int, rng: torch.Generator, path: list[int] | None = None) -> list[int]:
    """A topological tree of depth <= 15, node 0 the root; the path's nodes follow each other."""
    path = path or [0]
    above = dict(zip(path[1:], path, strict=False))
    coins = torch.rand(N, 2, generator=rng).tolist()  # deep and bushy by turns
    parents, depth = [-1], [0]
    for n in range(1, N):
        parent = above.get(n, n - 1 if coins[n][0] < 0.5 else int(coins[n][1] * n))
        parents.append(parent if depth[parent] < 15 else 0)
        depth.append(depth[parents[n]] + 1)
    return parents


def ancestor_words(parents: list[int], N: int) -> list[int]:
    """Signed 64-bit words; nodes beyond the tree are padding."""
    words = []
    for n, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << n)
    signed = [w - (1 << 64) if w >> 63 else w for w in words]
    return signed + [0] * (N - len(parents))


def paged(slots: list[int], dtype: torch.dtype, width: int, rng: torch.Generator):
    """A cache of NaN with a page for every 64 slots of each sequence, in shuffled order."""
    pages = [-(-count // 64) for count in slots]
    total, max_pages = sum(pages) + 2, max(pages) + 2
    order = torch.randperm(total, generator=rng).int()
    block_table = torch.full((len(slots), max_pages), WILD, dtype=torch.int32)
    for b, count in enumerate(pages):
        block_table[b, :count] = order[sum(pages[:b]) :][:count]
    return torch.full((total, 64, width), float("nan"), dtype=dtype), block_table


def random_case(context, N, H, C, R, dtype, rng, nodes=None, chain=False) -> Case:
    """nodes: how many of N are not padding, per sequence. Scores have sigma 2."""
    B, Z = len(context), C + R
    nodes = nodes or [N] * B
    cache, block_table = paged([s + n for s, n in zip(context, nodes, strict=True)], dtype, Z, rng)
    words = [ancestor_words(random_parents(n, rng) if n else [], N) for n in nodes]
    case = Case(
        q=2 * torch.randn(B, N, H, Z, generator=rng).to(dtype),
        cache=cache,
        block_table=block_table,
        context=torch.tensor(context, dtype=torch.int32),
        ancestors=None if chain else torch.tensor(words),
        latent=C,
        scale=Z**-0.5,
    )
    for b in range(B):
        slots = range(context[b] + nodes[b])
        case.cache[case.rows(b, slots)] = torch.randn(len(slots), Z, generator=rng).to(dtype)
    return case
