"""What a round does beside its tree and the layers: nodes' places, matches, the state's commit."""

import torch
from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def tree_place(
    context: Tensor, block_table: Tensor, depth: Tensor, ancestors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Where a tree's nodes stand: at context + depth; in the cache row of token context + n.

    context: [B] int32, committed tokens; block_table: [B, max_pages] int32
    depth: [B, N] int32; ancestors: [B, N] int64, 0 at padding; None where there is none
    returns position and slot, [B, N] int32, -1 at padding; a node beyond the pages has a slot of
    the last
    """
    return ops.tree_place.default(context, block_table, depth, ancestors)


@register_fake("kdtree::tree_place")
def _(context, block_table, depth, ancestors):
    return depth.new_empty(depth.shape), depth.new_empty(depth.shape)


def ngram_match(
    token: Tensor,
    length: Tensor,
    longest: int,
    matches: int,
    depth: int,
    first: float,
    next: float,
    rank: float,
) -> tuple[Tensor, Tensor]:
    """What followed where the known tokens stood before, as candidates and edges of a tree.

    token: [B, X] int64, of which the first length: [B] int32 are known
    longest: tokens of a match that are compared, 1 .. 64, from the last known one backwards; the
    longest match is the best, the latest among equals
    matches: M, how many are followed, 1 .. 64; depth: J, how many tokens each, 1 .. 15
    first, next, rank: a match's first token scores first + rank * its place, each later one next
    returns candidate [B, J, M] int64 and score [B, J, M, M] float32, as tree_build takes them:
    where matches begin alike the best of them has the shared tokens, the others score -inf there
    """
    return ops.ngram_match.default(token, length, longest, matches, depth, first, next, rank)


@register_fake("kdtree::ngram_match")
def _(token, length, longest, matches, depth, first, next, rank):
    shape = (token.shape[0], depth, matches)
    return token.new_empty(shape), token.new_empty((*shape, matches), dtype=torch.float32)


def state_commit(
    token: Tensor,
    length: Tensor,
    active: Tensor,
    limit: Tensor,
    stop: Tensor,
    emitted: Tensor,
    count: Tensor,
    logprob: Tensor,
    failed: Tensor,
    depth: Tensor | None = None,
) -> Tensor:
    """Appends what a round emitted, up to the first stop token, then up to the limit. In place.

    token: [B, X] int64, what is known, length: [B] int32, how much; active: [B] bool, set to False
    at an end; limit: [B] int32, the length at which a sequence ends, at most X
    stop: [B, S] int64, tokens that end it, -1 for none, S <= 64
    emitted: [B, J] int64, of which count: [B] int32 are meant; logprob: [B, J] float32, of those
    failed: [B] bool: the walk met logits that are not finite
    depth: [B, N] int32, of the tree's nodes
    returns the record [B, 2 + 2 J] int64: tokens kept; 0 where the sequence goes on, 1 where a stop
    token, 2 where the limit and 3 where a failure ended it; emitted; the bits of logprob. With a
    depth [B, 4 + 2 J], before all this the depth offered, the greatest, and accepted, count - 1
    """
    return ops.state_commit.default(
        token, length, active, limit, stop, emitted, count, logprob, failed, depth
    )


@register_fake("kdtree::state_commit")
def _(token, length, active, limit, stop, emitted, count, logprob, failed, depth):
    return token.new_empty((len(token), (2 if depth is None else 4) + 2 * emitted.shape[1]))
