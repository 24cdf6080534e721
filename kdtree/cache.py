"""The paged latent cache, and where a tree's nodes stand in it."""

import os
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree import ops
from kdtree.config import ModelConfig
from kdtree.errors import CapacityError, ConfigError
from kdtree.tree import MAX_NODES, Path, TokenTree

PAGE = 64  # tokens
FP8_ALIGN = 16  # bytes of the parts of a row of FP8 latents, csrc/attention.h


def fp8_row_bytes(latent: int, rope: int) -> int:
    """Of a cached token: e4m3 latents, their scale, the rope part in bfloat16."""
    return latent + FP8_ALIGN + -(-2 * rope // FP8_ALIGN) * FP8_ALIGN


def fp8_parts(rows: Tensor, latent: int, rope: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of rows [..., bytes] with FP8 latents: codes, their scale [..., 1], the rope part."""
    at = latent + FP8_ALIGN
    codes, scale, rest = rows[..., :latent], rows[..., latent : latent + 4], rows[..., at:]
    return (
        codes.view(torch.float8_e4m3fn),
        scale.view(torch.float32),
        rest[..., : 2 * rope].view(torch.bfloat16),
    )


def check_fp8(config: ModelConfig) -> None:
    """Raises ConfigError where the model's latents cannot be cached in FP8."""
    latent = config.mla.kv_lora_rank
    if latent % FP8_ALIGN:
        raise ConfigError(
            f"kv_cache_dtype is 'fp8', which wants kv_lora_rank to be a multiple of {FP8_ALIGN}, "
            f"but the model's is {latent}"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A tree placed in the cache: exactly what one forward needs.

    token: [B, N] int64
    position: [B, N] int32, context + depth; -1 at padding
    slot: [B, N] int32, page * 64 + offset of each node's cache row; -1 at padding
    ancestors: [B, N] int64, or None for a chain
    block_table: [B, max_pages] int32; context: [B] int32
    start: where a chunk of one prompt begins, its context on the host; None in decoding. It is what
        lets a layer attend in another form, never the number of rows.
    """

    token: Tensor
    position: Tensor
    slot: Tensor
    ancestors: Tensor | None
    block_table: Tensor
    context: Tensor
    start: int | None = None


def free_bytes(device: torch.device) -> int:
    """Memory that an allocation on the device may take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_room(what: str, nbytes: int, device: torch.device) -> None:
    """Raises CapacityError where the device has not so many bytes. what: what takes them"""
    free = free_bytes(device)
    if nbytes > free:
        raise CapacityError(
            f"{what} takes {nbytes / 2**30:.2f} GiB, {device} has {free / 2**30:.2f} GiB free"
        )


class KvCache:
    """Latents of all layers for B sequences of up to max_seq_len tokens, in pages of 64 tokens.

    data: [L, pages, 64, C + R], or in FP8 uint8 [L, pages, 64, fp8_row_bytes(C, R)]; layer l's rows
    are data[l]
    dtype: of the activations
    block_table: [B, max_pages] int32, a sequence's pages in order
    context: [B] int32, committed tokens
    width: of a row
    Node n of a tree takes the token slot context + n, so N - 1 slots beyond max_seq_len exist.
    Raises CapacityError where the device has not the memory.
    """

    def __init__(
        self,
        layers: int,
        width: int,
        sequences: int,
        max_seq_len: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        fp8: bool = False,
    ):
        pages = -(-(max_seq_len + MAX_NODES - 1) // PAGE)
        shape = (layers, sequences * pages, PAGE, width)
        stored = torch.uint8 if fp8 else dtype
        asked = torch.Size(shape).numel() * stored.itemsize
        require_room(f"a cache of {sequences} x {max_seq_len} tokens", asked, torch.device(device))
        self.dtype = dtype
        self.data = torch.zeros(shape, device=device, dtype=stored)
        table = torch.arange(sequences * pages, dtype=torch.int32, device=device)
        self.block_table = table.view(sequences, pages)
        self.context = torch.zeros(sequences, dtype=torch.int32, device=device)

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        sequences: int,
        max_seq_len: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> "KvCache":
        """Of a model. fp8: latents in FP8, which check_fp8 has allowed"""
        latent, rope = config.mla.kv_lora_rank, config.mla.rope
        width = fp8_row_bytes(latent, rope) if fp8 else latent + rope
        where = {"device": device, "dtype": dtype, "fp8": fp8}
        return cls(config.layers, width, sequences, max_seq_len, **where)

    def sequence(self, b: int) -> "KvCache":
        """A view of sequence b alone; what is written through it is written here."""
        view = copy(self)
        view.block_table = self.block_table[b : b + 1]
        view.context = self.context[b : b + 1]
        return view

    def place(self, tree: TokenTree, start: int | None = None) -> Step:
        """Positions and slots of a tree's nodes, after the committed context. start: as in Step"""
        where = ops.tree_place(self.context, self.block_table, tree.depth, tree.ancestors)
        return Step(tree.token, *where, tree.ancestors, self.block_table, self.context, start)

    def commit(self, path: Path) -> None:
        """Keeps the rows of the accepted paths, moved to their final slots."""
        ops.kv_compact(self.data, self.block_table, self.context, path.node, path.length)
        self.context += path.length

    def extend(self, tokens: int) -> None:
        """Keeps the rows of a chain that is known to be right: a chunk of the prompt."""
        self.context += tokens
