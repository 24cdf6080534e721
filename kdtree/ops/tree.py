"""Draft trees: candidates, the best-first tree, the target's draw at each node, the walk."""

import torch
from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row with their exact log-probabilities, ties to the lower id.

    logits: [T, W] float32, contiguous, W <= 2^24; k: 1 .. min(W, 64)
    returns log-probabilities [T, k] float32, best first, and ids [T, k] int64; a row with a NaN, a
    +inf or nothing but -inf has no log-probabilities: NaN
    """
    return ops.top_logprobs.default(logits, k)


@register_fake("kdtree::top_logprobs")
def _(logits, k):
    shape = (logits.shape[0], k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


def draft_logits(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
) -> Tensor:
    """A drafter's logits, sharpened, and coupled to the noise that `sample` will draw with.

    (a q + b t g) / (1 + c t), q the row's log-probabilities, t the temperature, g the noise of the
    token drawn at position + 1 + j; where b t is 0 there is none
    logits: [B, J, W] float32, contiguous, W <= 2^24
    position: [B] int32, of the root; seed: [B] int64; temperature: [B] float32, >= 0
    a, b, c: [J] float32, by depth
    returns [B, J, W] float32, log-probabilities but for a constant a row; a row with a NaN, a +inf
    or nothing but -inf is NaN
    """
    return ops.draft_logits.default(logits, position, seed, temperature, a, b, c)


@register_fake("kdtree::draft_logits")
def _(logits, position, seed, temperature, a, b, c):
    return logits.new_empty(logits.shape)


def tree_build(
    score: Tensor,
    candidate: Tensor,
    root: Tensor,
    budget: int,
    chain_seed: bool = False,
    active: Tensor | None = None,
    length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The best-first draft tree of at most `budget` nodes beside the root, N = budget + 1.

    score: [B, J, M] float32, log-probability of each candidate of a depth, J <= 15, M <= 64; or
    [B, J, M, M], of candidate m' at a depth after candidate m of the depth before
    candidate: [B, J, M] int64, tokens
    root: [B] int64, the last committed token; or with length: [B] int32 the known tokens [B, X]
    chain_seed: insert the chain of best children first
    active: [B] bool, whose tree has nodes at all; None for all
    returns token [B, N] int64, parent [B, N] int32, depth [B, N] int32, ancestors [B, N] int64 and
    score [B, N] float32 (the path's log-probability); missing nodes have parent -2, ancestors 0
    The order and the arithmetic are exact: every device gives the same tree, bit for bit.
    """
    return ops.tree_build.default(score, candidate, root, budget, chain_seed, active, length)


@register_fake("kdtree::tree_build")
def _(score, candidate, root, budget, chain_seed, active, length):
    shape = (score.shape[0], budget + 1)
    int32, int64 = torch.int32, torch.int64
    dtypes = (int64, int32, int32, int64, torch.float32)
    return tuple(score.new_empty(shape, dtype=dtype) for dtype in dtypes)


def sample(
    logits: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    raw: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws the token that follows each row: Gumbel-max, noise by seed and position alone.

    logits: [B, N, W] float32, contiguous, W <= 2^24
    position: [B, N] int32, of the row (the drawn token stands at position + 1); negative at padding
    seed: [B] int64; temperature: [B] float32, 0 for argmax; top_k: [B] int32, 0 for all;
    top_p: [B] float32 in (0, 1]; min_p: [B] float32 in [0, 1)
    raw: [B, N, W] float32, the logits that log-probabilities are of, where `logits` were masked
    returns token [B, N] int64, log-probability of the raw logits [B, N] float32, and finite [B, N]
    bool: False where the row holds a NaN, a +inf or nothing but -inf (its token is -1)
    """
    return ops.sample.default(logits, position, seed, temperature, top_k, top_p, min_p, raw)


@register_fake("kdtree::sample")
def _(logits, position, seed, temperature, top_k, top_p, min_p, raw):
    shape = logits.shape[:2]
    dtypes = (torch.int64, torch.float32, torch.bool)
    return tuple(logits.new_empty(shape, dtype=dtype) for dtype in dtypes)


def tree_accept(
    token: Tensor, parent: Tensor, target: Tensor, finite: Tensor, logprob: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Walks from the root while the target's own token is a child of the node.

    token: [B, N] int64 and parent: [B, N] int32, the tree; target: [B, N] int64, finite: [B, N]
    bool and logprob: [B, N] float32, from sample
    returns path [B, J] int32, node numbers, -1 from length on, J = min(N, 16); length [B] int32,
    nodes committed and tokens emitted; tokens [B, J] int64, emitted, -1 from length on, and their
    log-probabilities [B, J] float32, 0 there; failed [B] bool: the walk met a node whose logits are
    not finite, and ended before it
    """
    return ops.tree_accept.default(token, parent, target, finite, logprob)


@register_fake("kdtree::tree_accept")
def _(token, parent, target, finite, logprob):
    B, N = token.shape
    J = min(N, 16)
    return (
        parent.new_empty((B, J)),
        parent.new_empty((B,)),
        token.new_empty((B, J)),
        logprob.new_empty((B, J)),
        finite.new_empty((B,)),
    )


def tree_choose(
    parent: Tensor, depth: Tensor, score: Tensor, factor: Tensor, sizes: Tensor, seconds: Tensor
) -> tuple[Tensor, Tensor]:
    """Which of some sizes of a tree, cut to its first nodes, is expected to emit the most a second.

    parent, depth: [B, N] int32 and score: [B, N] float32, the tree
    factor: [15, 3] float32, of a node's claimed chance after its parent, by depth - 1 and kind: on
    the spine of best children, beside it, below that
    sizes: [S] int32, of 1 to N nodes, S at most 64; seconds: [S] float32, what a round of each
    takes, above 0; inf for one that is not to be chosen
    returns choice [1] int32, the number of the size, the first of equals, and expected [N] float32:
    tokens that all sequences emit together with a tree of the first n + 1 nodes
    """
    return ops.tree_choose.default(parent, depth, score, factor, sizes, seconds)


@register_fake("kdtree::tree_choose")
def _(parent, depth, score, factor, sizes, seconds):
    return parent.new_empty((1,)), score.new_empty((parent.shape[1],))


def clock(times: Tensor, slot: int) -> None:
    """Writes to times[slot], int64, the nanoseconds of the device's clock, or of the CPU's, when
    all that was launched before it is done."""
    ops.clock.default(times, slot)


@register_fake("kdtree::clock")
def _(times, slot):
    pass
