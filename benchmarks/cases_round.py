"""What a round does beside its tree and the layers: nodes' places, matches, the state's commit."""

import math
from collections.abc import Iterator
from functools import partial

import eager
import torch
from cases import Bench, Case, turning

from kdtree import ops

LAW = math.log(0.5), math.log(0.8), math.log(0.7)  # of kdtree.drafters.ngram


def tree_place(b: Bench) -> Iterator[Case]:
    context, table = b.tensor([1000]), b.tensor([[*range(100)]])
    for N in (8, 64):
        depth = b.ints(1, N, high=15)
        ancestors = b.ints(1, N, high=2, dtype=torch.int64)  # padding here and there
        run = partial(ops.tree_place, context, table, depth, ancestors)
        plain = partial(eager.tree_place, context, table, depth, ancestors)
        assert all(map(torch.equal, run(), plain())), "tree_place: other places"
        yield Case({"B": 1, "N": N}, run, 20 * N, 0, ("eager", plain))


def ngram_match(b: Bench) -> Iterator[Case]:
    """A token in 50 is the last one, as common words are."""
    J, M = 7, 4
    for S in b.size.cached:
        tokens, length = b.copies(b.ints(1, S, high=50, dtype=torch.int64)), b.tensor([S])
        run = turning(lambda token, at=length: ops.ngram_match(token, at, 3, M, J, *LAW), tokens)
        want = ops.ngram_match(tokens[0].cpu(), length.cpu(), 3, M, J, *LAW)
        assert all(map(torch.equal, (x.cpu() for x in run()), want)), "ngram_match: other matches"
        yield Case({"B": 1, "S": S, "J": J, "M": M}, run, 8 * S, 0)


def state_commit(b: Bench) -> Iterator[Case]:
    J, S, X = 16, 64, 4096
    for B in (1, 8):
        token, length = b.ints(B, X, high=b.size.W, dtype=torch.int64), b.tensor([100] * B)
        state = token, length, torch.ones(B, dtype=torch.bool, device=b.device)
        limit, stop = b.tensor([4000] * B), b.ints(B, S, high=b.size.W, dtype=torch.int64)
        emitted, count = b.ints(B, J, high=b.size.W, dtype=torch.int64), b.tensor([J] * B)
        outcome = emitted, count, b.rand(B, J, dtype=torch.float32), count < 0
        given = *state, limit, stop, *outcome
        copy = [x.clone() for x in given]
        same = torch.equal(ops.state_commit(*copy), eager.state_commit(*given))
        assert same and torch.equal(copy[0][:, :-1], token[:, :-1]), "state_commit: another state"
        moved = B * (8 * S + 36 * J)
        run, plain = partial(ops.state_commit, *given), partial(eager.state_commit, *given)
        yield Case({"B": B, "J": J}, run, moved, 0, ("eager", plain))
