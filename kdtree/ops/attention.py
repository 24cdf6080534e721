"""The model's attention: MLA in absorbed form, over a paged cache of latents."""

from torch import Tensor
from torch.library import register_fake

from kdtree.ops._library import ops


def mla_query(q: Tensor, w_uk: Tensor, rope: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Queries in the cache's space: each head's nope part absorbed by w_uk, its rope part rotated.

    q: [T, H, P + R], rows may be strided, heads and features contiguous; float32 or bfloat16
    w_uk: [H, C, P], dtype of q
    rope: [positions, R] float32, R / 2 cosines then R / 2 sines
    position: [T] int32, < positions (beyond, the last is read); negative marks a padded row, whose
    output is zero
    interleaved: rotate the pairs (2i, 2i + 1) in place, else (i, i + R / 2)
    returns [T, H, C + R], dtype of q
    """
    return ops.mla_query.default(q, w_uk, rope, position, interleaved)


@register_fake("kdtree::mla_query")
def _(q, w_uk, rope, position, interleaved):
    return q.new_empty((q.shape[0], q.shape[1], w_uk.shape[1] + rope.shape[1]))


def mla_append(
    cache: Tensor,
    kv: Tensor,
    w: Tensor,
    eps: float,
    rope: Tensor,
    position: Tensor,
    slot: Tensor,
    interleaved: bool,
) -> None:
    """Writes each row's normed latent and rotated rope part into the cache, in place.

    cache: [pages, 64, C + R], contiguous; float32 or bfloat16
    kv: [T, C + R], rows contiguous, dtype of cache
    w: [C], dtype of cache, the latent norm's weight
    rope: [positions, R] float32 as in mla_query; position: [T] int32
    slot: [T] int32, page * 64 + offset, distinct; a row whose slot is negative or beyond the cache
    is padding and skipped
    """
    ops.mla_append.default(cache, kv, w, eps, rope, position, slot, interleaved)


@register_fake("kdtree::mla_append")
def _(cache, kv, w, eps, rope, position, slot, interleaved):
    return None


def mla_query_append(
    cache: Tensor,
    q: Tensor,
    w_uk: Tensor,
    kv: Tensor,
    w: Tensor,
    eps: float,
    rope: Tensor,
    position: Tensor,
    slot: Tensor,
    interleaved: bool,
) -> Tensor:
    """mla_append and mla_query of the same rows, with their arguments and bits.

    On a GPU one launch where q is bfloat16 and P at most 512. kv and w have the dtype of q too.
    returns [T, H, C + R], dtype of q
    """
    return ops.mla_query_append.default(
        cache, q, w_uk, kv, w, eps, rope, position, slot, interleaved
    )


@register_fake("kdtree::mla_query_append")
def _(cache, q, w_uk, kv, w, eps, rope, position, slot, interleaved):
    return q.new_empty((q.shape[0], q.shape[1], w_uk.shape[1] + rope.shape[1]))


def mla_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    context: Tensor,
    ancestors: Tensor | None,
    latent: int,
    scale: float,
) -> Tensor:
    """Verify attention: every tree node attends to the context and to its own ancestors.

    q: [B, N, H, C + R] from mla_query, C + R <= 768; float32 or bfloat16
    cache: [pages, 64, C + R], dtype of q, holding the context's rows and the nodes' own
    block_table: [B, max_pages] int32, the page of each run of 64 tokens of a sequence
    context: [B] int32, committed tokens before the root; the table holds the N slots behind them
    ancestors: [B, N] int64, bit m set for node m an ancestor or self, 0 at padded rows (N <= 64,
    depth <= 15); or None for a chain of any length, row n at position context + n
    latent: C
    returns [B, N, H, C], dtype of q: the softmax-weighted latents; zero at padded rows
    The bits of a row depend on its position and on its keys alone, not on the slots that hold them.
    """
    return ops.mla_attention.default(q, cache, block_table, context, ancestors, latent, scale)


@register_fake("kdtree::mla_attention")
def _(q, cache, block_table, context, ancestors, latent, scale):
    return q.new_empty((*q.shape[:3], latent))


def kv_compact(
    cache: Tensor, block_table: Tensor, context: Tensor, path: Tensor, length: Tensor
) -> None:
    """Moves each accepted path's rows to their final slots, in every layer, in place.

    cache: [L, pages, 64, Z], contiguous, any dtype; block_table: [B, max_pages] int32
    context: [B] int32; path: [B, J] int32, ascending node numbers, path[b, i] >= i
    length: [B] int32, how many of path are accepted; slot context + path[i] -> context + i
    """
    ops.kv_compact.default(cache, block_table, context, path, length)


@register_fake("kdtree::kv_compact")
def _(cache, block_table, context, path, length):
    return None
