"""Attention of a chunk of a prompt over un-absorbed keys and values.

Many rows share what is made of a latent, so it pays to make each head's own key and value of it:
320 products a row, head and position instead of the 1088 of the absorbed form. They are made anew
for each chunk, of the whole context, by torch's products. Those depend in their bits on how many
rows they have, so chunks have fixed absolute ends; decoding has no part in this.
"""

import torch
from torch import Tensor

from kdtree import ops
from kdtree.cache import PAGE, Step, fp8_parts, require_room
from kdtree.card import mma_sync
from kdtree.config import MlaConfig

ROOM = 2**30  # bytes of the keys and values that there are at a time: of a slice of the heads
RUN = 64  # pages of a cache in FP8 that are widened at a time: 4096 tokens
FAST = (128, 64, 128)  # nope, rope and value widths that ops.mla_prefill has tensor cores for


def unabsorbs(c: MlaConfig, w_uk: Tensor) -> bool:
    """Whether chunks of prompts take this form: where it is fast, by model and device alone."""
    if w_uk.device.type != "cuda" or w_uk.dtype != torch.bfloat16:
        return False
    if mma_sync():
        return False
    sm_90 = torch.cuda.get_device_capability(w_uk.device)[0] == 9
    return sm_90 and (c.nope, c.rope, c.value) == FAST


def attend(
    query: Tensor, w_uk: Tensor, w_uv: Tensor, rope: Tensor, step: Step, cache: Tensor, c: MlaConfig
) -> Tensor:
    """The heads' values of a chunk whose latents are in the cache.

    query: [N, H, P + R], not rotated; w_uk: [H, C, P]; w_uv: [H, V, C]
    rope, cache: as Mla.forward takes them; step: of one sequence, with its start
    returns [N, H, V]
    """
    assert step.start is not None and step.token.shape[0] == 1
    keys, table = step.start + len(query), step.block_table[0]
    latents, scratch = _memory(table.shape[0], query, c)
    pages = table[: -(-keys // PAGE)]
    if cache.dtype == torch.uint8:
        _widen(cache, pages, c, latents[: len(pages)])
    else:
        whole, found = (x.flatten(1).view(torch.int64) for x in (cache, latents[: len(pages)]))
        torch.index_select(whole, 0, pages, out=found)  # four features at once
    latent, k_rope = latents.flatten(0, 1)[:keys].split([c.kv_lora_rank, c.rope], 1)
    values = []
    for heads in _slices(c.heads, keys * (c.nope + c.value) * scratch.itemsize):
        k, v = _unabsorbed(latent, w_uk[heads], w_uv[heads], scratch)
        values.append(
            ops.mla_prefill(query[:, heads], k, v, k_rope, rope, c.rotary.interleaved, c.scale)
        )
    return values[0] if len(values) == 1 else torch.cat(values, 1)


def _widen(cache: Tensor, pages: Tensor, c: MlaConfig, out: Tensor) -> None:
    """The rows of some pages of a cache in FP8, as decoding reads them: rounded to bfloat16.

    out: [pages, 64, C + R]; a run of pages at a time, because latents are float32 on their way
    """
    C, R = c.kv_lora_rank, c.rope
    for run, to in zip(pages.split(RUN), out.split(RUN), strict=True):
        codes, scale, rope = fp8_parts(cache.index_select(0, run), C, R)
        to[..., :C] = codes.float() * scale
        to[..., C:] = rope


def _memory(pages: int, like: Tensor, c: MlaConfig) -> tuple[Tensor, Tensor]:
    """Room for the longest context's latents [pages, 64, C + R], and for keys and values.

    like: of their device and dtype
    One block, of the same size for every chunk and layer, so that torch's allocator finds it again.
    Raises CapacityError where the device has not the memory.
    """
    row = c.kv_lora_rank + c.rope
    latents = pages * PAGE * row
    head = pages * PAGE * (c.nope + c.value)
    scratch = min(c.heads * head, max(head, ROOM // like.itemsize))
    size = latents + scratch
    try:
        block = like.new_empty(size)
    except torch.OutOfMemoryError:
        require_room("a chunk of a prompt", size * like.itemsize, like.device)
        raise
    return block[:latents].view(pages, PAGE, row), block[latents:]


def _slices(heads: int, head_bytes: int) -> list[slice]:
    """As few even runs of heads as fit in ROOM."""
    count = -(-heads // max(1, ROOM // head_bytes))
    edges = [i * heads // count for i in range(count + 1)]
    return [slice(*ends) for ends in zip(edges, edges[1:], strict=False)]


def _unabsorbed(
    latent: Tensor, w_uk: Tensor, w_uv: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys [h, keys, P] and values [h, keys, V] of some heads. latent: [keys, C]"""
    (h, C, P), V, keys = w_uk.shape, w_uv.shape[1], len(latent)
    k, v = scratch[: keys * h * (P + V)].split([keys * h * P, keys * h * V])
    k = torch.bmm(latent.expand(h, keys, C), w_uk, out=k.view(h, keys, P))
    v = torch.mm(latent, w_uv.flatten(0, 1).T, out=v.view(keys, h * V))
    return k, v.view(keys, h, V).transpose(0, 1)
