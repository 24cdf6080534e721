"""A block drafter's own ops: its block's embeddings, attention, convolutions, cache and edges."""

from collections.abc import Sequence

from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def block_embed(
    token: Tensor, length: Tensor, table: Tensor, mask: Tensor, slots: int, scale: float
) -> Tensor:
    """Embeddings of a block: of the root, the last token that is known, then of masks.

    token: [B, X] int64; length: [B] int32, how many of them are known, 1 or more
    table: [W, D], float32 or bfloat16; a root that is none of its rows is taken as the nearest
    mask: [D], float32 or bfloat16
    returns [B, slots, D], dtype of mask, all of it times scale
    """
    return ops.block_embed.default(token, length, table, mask, slots, scale)


@register_fake("kdtree::block_embed")
def _(token, length, table, mask, slots, scale):
    return mask.new_empty((token.shape[0], slots, mask.shape[0]))


def block_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    cache: Tensor,
    length: Tensor,
    window: int,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention of a block of N draft slots over cached keys and over the block's own.

    qkv: [B, N, H + 2 G, width], H heads of queries, G of keys, G of values, as projected; width
    even, <= 256; H a multiple of G; float32 or bfloat16; slot i stands at position length + i
    q_norm, k_norm: [width], dtype of qkv, of the norm that each head of a query or key has
    rope: [positions, width] float32, cosines then sines, by which they are then rotated in pairs
    (i, i + width / 2); beyond the table its last row is read
    cache: [B, S, 2, G, width], dtype of qkv, keys and values as block_append leaves them; position
    p is row p % S
    length: [B] int32, positions cached; more than S of them only with a window
    window: a slot sees what is less than so many positions away, <= S + 1; 0 for no window
    causal: a slot sees the block's slots up to its own, else all of them
    returns [B, N, H, width], dtype of qkv
    The bits of a row depend on its sequence's rows alone, not on B or S.
    """
    return ops.block_attention.default(
        qkv, q_norm, k_norm, eps, rope, cache, length, window, causal, scale
    )


@register_fake("kdtree::block_attention")
def _(qkv, q_norm, k_norm, eps, rope, cache, length, window, causal, scale):
    B, N, heads, width = qkv.shape
    return qkv.new_empty((B, N, heads - 2 * cache.shape[3], width))


def block_append(
    cache: Tensor,
    kv: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: Tensor,
    start: Tensor,
    path: Tensor | None,
    kept: Tensor | None,
    rows: Sequence[int],
    first: int,
) -> None:
    """Writes keys and values of committed tokens into the cache, in place, in all layers.

    cache: [sequences * sum(rows), 2, G, width], contiguous: layer by layer, in a layer sequence by
    sequence; float32 or bfloat16
    kv: [Q, N, L, 2, G, width], dtype of cache, each node's keys and values as projected; of the
    sequences from `first` on
    k_norm: [L, width], dtype of cache; rope: [positions, width] float32, as in block_attention
    start: [Q] int32, positions cached before
    path: [Q, J] int32, the nodes in order, what is none of the N is skipped; None for all N
    kept: [Q] int32, how many of them are committed, the first ones; None for all
    rows: each layer's, S: the last S positions stay, p at row p % S
    """
    ops.block_append.default(cache, kv, k_norm, eps, rope, start, path, kept, rows, first)


@register_fake("kdtree::block_append")
def _(cache, kv, k_norm, eps, rope, start, path, kept, rows, first):
    return None


def block_conv(x: Tensor, dynamic: Tensor, base: Tensor, slots: int) -> Tensor:
    """A convolution over each block's slots, each taking in those before it; in float32.

    x: [T, D], contiguous, `slots` rows a block; float32 or bfloat16
    dynamic: [T, taps, groups], dtype of x, rows contiguous: a part of each slot's kernel that
    D / groups channels share; base: [taps, D], dtype of x, what is added to it
    returns [T, D], dtype of x
    """
    return ops.block_conv.default(x, dynamic, base, slots)


@register_fake("kdtree::block_conv")
def _(x, dynamic, base, slots):
    return x.new_empty(x.shape)


def edge_scores(
    score: Tensor,
    candidate: Tensor,
    token: Tensor,
    length: Tensor,
    temperature: Tensor,
    a: Tensor,
    c: Tensor,
    more: Tensor | None = None,
    weight: Tensor | None = None,
    direction: Tensor | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Scores of each depth's candidates after each one of the depth before, of one mass.

    An edge e(m, m') = weight <before[m] * direction, after[m']> + more[m, m'], times a / (1 + c t),
    is added to the score of m' where it follows m; then the M are shifted to the mass they had.
    score: [B, J, M] float32, logarithms, M <= 64; candidate: [B, J, M] int64, tokens
    token: [B, X] int64, length: [B] int32: the last token that is known stands before depth 1
    temperature: [B] float32, t; a, c, weight: [J] float32, by depth
    more: [B, J, M, M] float32, or None for none
    direction: [B, J, R] float32; before, after: [W, R], rows by token, float32 or bfloat16; these
    three and weight come together, or None for none
    returns [B, J, M, M] float32; -inf where it would be NaN
    """
    return ops.edge_scores.default(
        score, candidate, token, length, temperature, a, c, more, weight, direction, before, after
    )


@register_fake("kdtree::edge_scores")
def _(score, candidate, token, length, temperature, a, c, more, weight, direction, before, after):
    return score.new_empty((*score.shape, score.shape[2]))
