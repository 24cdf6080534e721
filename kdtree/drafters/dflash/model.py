"""The DFlash block diffusion drafter: what a few layers make of the target's features and a block.

Module names are the checkpoint's, but for matrices that are stored apart and multiplied as one.
Source: arXiv 2602.06036, section 4; convolutions and selector: https://inco.ai/blog/dflash2.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.drafters.dflash.cache import ContextCache
from kdtree.drafters.dflash.config import Architecture
from kdtree.drafters.dflash.conv import BlockConv
from kdtree.errors import CheckpointError
from kdtree.layers import Int4Linear, Linear, Mlp, RmsNorm, rope_table, stored_linear
from kdtree.layers.linear import frozen, joined
from kdtree.weights import Weights


class Attention(nn.Module):
    """Attention of one layer; the same matrices make keys and values of features and of slots.

    kv: the product for keys and values, Dflash's for all layers holds it too
    """

    def __init__(self, c: Architecture, w: Weights, kv: Linear | Int4Linear):
        super().__init__()
        self.c = c
        query = stored_linear(w, ["q_proj"], c.heads * c.head, c.hidden)
        if type(query) is not type(kv):
            stored = {Int4Linear: "INT4", Linear: "plain"}
            raise CheckpointError(
                f"{w.prefix}q_proj is stored {stored[type(query)]}, its k_proj and v_proj"
                f" {stored[type(kv)]}: wants the three alike"
            )
        self.qkv_proj = joined(query, kv)
        self.o_proj = stored_linear(w, ["o_proj"], c.hidden, c.heads * c.head)
        self.q_norm = frozen(w.take("q_norm.weight", c.head))
        self.k_norm = frozen(w.take("k_norm.weight", c.head))

    def forward(self, x: Tensor, rope: Tensor, cache: ContextCache, layer: int, length: Tensor):
        """x: [B * N, D], slots, normed; length: [B] int32, cached positions; returns [B * N, D]."""
        c = self.c
        mixed = ops.block_attention(
            self.qkv_proj(x).view(len(length), -1, c.heads + 2 * c.kv_heads, c.head),
            self.q_norm,
            self.k_norm,
            c.norm_eps,
            rope,
            cache.layers[layer],
            length,
            cache.windows[layer],
            c.attention[layer].causal,
            c.head**-0.5,
        )
        return self.o_proj(mixed.view(len(x), -1))


class Layer(nn.Module):
    """The parameters of one layer; Dflash.forward runs it."""

    def __init__(self, c: Architecture, w: Weights, kv: Linear | Int4Linear):
        super().__init__()
        self.input_layernorm = RmsNorm(w.take("input_layernorm.weight", c.hidden), c.norm_eps)
        self.self_attn = Attention(c, w.at("self_attn"), kv)
        self.post_attention_layernorm = RmsNorm(
            w.take("post_attention_layernorm.weight", c.hidden), c.norm_eps
        )
        self.mlp = Mlp(c.hidden, c.width, w.at("mlp"))
        self.attention_conv = self.mlp_conv = None
        if c.convolution:
            shape = c.convolution, c.hidden, c.block
            self.attention_conv = BlockConv(*shape, w.at("attention_conv"))
            self.mlp_conv = BlockConv(*shape, w.at("mlp_conv"))


class PathSelector(nn.Module):
    """The parameters of the edge scores <A[a] * (P h), B[b]> of going from token a to b.

    hidden_projection: P [rank, D]; predecessor_codebook, successor_codebook: A, B [V, rank]
    """

    def __init__(self, c: Architecture, w: Weights):
        super().__init__()
        rank = c.selector.rank
        self.hidden_projection = Linear(w.take_matrix("hidden_projection.weight", rank, c.hidden))
        books = ("predecessor_codebook", "successor_codebook")
        names = [f"{name}.weight" if w.has(f"{name}.weight") else name for name in books]
        self.predecessor_codebook, self.successor_codebook = (
            frozen(w.take(name, c.vocab, rank)) for name in names
        )


class Dflash(nn.Module):
    """A drafter of the family.

    w: the tensors of its checkpoint; positions: rows of the rotary table
    embed_tokens, mask_embedding, lm_head: its own, or None where it shares the target's
    kv_proj, k_norm: of all layers, for committed tokens, whose features are the same to each
    """

    def __init__(self, c: Architecture, w: Weights, positions: int):
        super().__init__()
        self.c = c
        own = {name: w.has(f"{name}.weight") for name in ("embed_tokens", "lm_head")}
        self.fc = stored_linear(w, ["fc"], c.hidden, len(c.taps) * c.hidden)
        self.hidden_norm = RmsNorm(w.take("hidden_norm.weight", c.hidden), c.norm_eps)
        layers, width = range(len(c.attention)), c.kv_heads * c.head
        names = [f"layers.{i}.self_attn.{x}_proj" for i in layers for x in "kv"]
        self.kv_proj = stored_linear(w, names, width, c.hidden)
        parts = [self.kv_proj.rows(2 * i * width, 2 * (i + 1) * width) for i in layers]
        self.layers = nn.ModuleList(Layer(c, w.at("layers").at(i), parts[i]) for i in layers)
        self.k_norm = frozen(torch.stack([layer.self_attn.k_norm for layer in self.layers]))
        self.norm = RmsNorm(w.take("norm.weight", c.hidden), c.norm_eps)
        self.selector = PathSelector(c, w.at("candidate_selector")) if c.selector else None
        self.embed_tokens = self.mask_embedding = self.lm_head = None
        if own["embed_tokens"]:
            self.embed_tokens = frozen(w.take_matrix("embed_tokens.weight", c.vocab, c.hidden))
        if w.has("mask_embedding"):
            self.mask_embedding = frozen(w.take("mask_embedding", c.hidden))
        if own["lm_head"]:
            head = w.take_matrix("lm_head.weight", c.vocab, c.hidden)
            self.lm_head = Linear(head, torch.float32)
        table = rope_table(c.rotary, c.head, positions, w.device)
        self.register_buffer("rope", table, persistent=False)

    def extend(
        self,
        cache: ContextCache,
        taps: Tensor,
        first: int,
        start: Tensor,
        path: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """Keys and values of committed tokens go to the cache.

        taps: [Q, n, len(c.taps) * D], of the sequences from `first` on
        start, path, kept: where they begin, which of the n they are and how many, see
        ops.block_append
        """
        features, _ = self.hidden_norm(self.fc(taps.flatten(0, 1)))
        shape = (*taps.shape[:2], len(self.layers), 2, self.c.kv_heads, self.c.head)
        kv = self.kv_proj(features).view(shape)
        cache.write(kv, self.k_norm, self.rope, first, start, path, kept)

    def forward(self, embedded: Tensor, cache: ContextCache, length: Tensor) -> Tensor:
        """The block's last hidden, normed.

        embedded: [B, N, D], of the last committed token and of masks; length: [B] int32, committed
        tokens before it; returns [B, N - 1, D], without the first slot
        """
        y, stream = embedded.flatten(0, 1), None
        for i, layer in enumerate(self.layers):
            y, stream = layer.input_layernorm(y, stream)
            attend = partial(layer.self_attn, rope=self.rope, cache=cache, layer=i, length=length)
            y = _around(layer.attention_conv, y, attend)
            y, stream = layer.post_attention_layernorm(y, stream)
            y = _around(layer.mlp_conv, y, layer.mlp)
        y, _ = self.norm(y, stream)
        return y.view(embedded.shape)[:, 1:].contiguous()

    def embed(self, token: Tensor, length: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        """Embeddings [B, N, D] of the block; arguments as in ops.block_embed."""
        return ops.block_embed(token, length, table, mask, self.c.block, self.c.embed_scale)

    def mask(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask's embedding [D]. table: [W, D]"""
        own = self.mask_embedding
        return (table[self.c.mask] if own is None else own).to(dtype)

    def scaled(self, logits: Tensor) -> Tensor:
        """Logits as the checkpoint has them scaled and capped; float32."""
        if self.c.logit_scale != 1:
            logits = logits * self.c.logit_scale
        if self.c.logit_cap:
            logits = torch.tanh(logits / self.c.logit_cap) * self.c.logit_cap
        return logits


def _around(conv: BlockConv | None, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    return sublayer(x) if conv is None else conv(x, sublayer)
