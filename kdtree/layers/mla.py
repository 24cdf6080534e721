"""Multi-head latent attention, in absorbed form over the latent cache.

The key up-projection is absorbed into the query, the value up-projection into the output, so that
attention runs over the cached latents themselves.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.cache import Step
from kdtree.config import MlaConfig
from kdtree.layers.linear import Linear, frozen
from kdtree.layers.rms_norm import RmsNorm
from kdtree.weights import Weights


class Mla(nn.Module):
    """Attention of one layer. w_uk: [H, C, P] and w_uv: [H, V, C], the two halves of kv_b_proj."""

    def __init__(self, config: MlaConfig, hidden: int, w: Weights):
        super().__init__()
        c = self.config = config
        width = c.heads * (c.nope + c.rope)
        latent = w.take_matrix("kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.rope, hidden)
        if c.q_lora_rank:
            # One product for both compressions of x.
            query = w.take_matrix("q_a_proj.weight", c.q_lora_rank, hidden)
            self.q_a_layernorm = RmsNorm(w.take("q_a_layernorm.weight", c.q_lora_rank), c.norm_eps)
            self.q_b_proj = Linear(w.take_matrix("q_b_proj.weight", width, c.q_lora_rank))
        else:
            query = w.take_matrix("q_proj.weight", width, hidden)
            self.q_a_layernorm = self.q_b_proj = None
        self.split = query.shape[0]
        self.qkv_a_proj = Linear(torch.cat([query, latent]))
        self.kv_a_layernorm = RmsNorm(w.take("kv_a_layernorm.weight", c.kv_lora_rank), c.norm_eps)
        up = w.take_matrix("kv_b_proj.weight", c.heads * (c.nope + c.value), c.kv_lora_rank)
        up = up.view(c.heads, c.nope + c.value, c.kv_lora_rank)
        w_uk = up[:, : c.nope].transpose(1, 2).to(w.dtype)
        self.w_uk = frozen(w_uk.contiguous())  # [H, C, P]
        self.w_uv = Linear(up[:, c.nope :].contiguous())  # [H, V, C]
        self.o_proj = Linear(w.take_matrix("o_proj.weight", hidden, c.heads * c.value))

    def forward(self, x: Tensor, rope: Tensor, step: Step, cache: Tensor) -> Tensor:
        """x: [T, D], normed; rope: [positions, R]; cache: [pages, 64, C + R]; returns [T, D]."""
        c, position = self.config, step.position.flatten()
        query, latent = self.qkv_a_proj(x).split([self.split, c.kv_lora_rank + c.rope], 1)
        if self.q_b_proj:
            query = self.q_b_proj(self.q_a_layernorm(query)[0])
        query = ops.mla_query_append(
            cache,
            query.unflatten(1, (c.heads, c.nope + c.rope)),
            self.w_uk,
            latent,
            self.kv_a_layernorm.weight,
            c.norm_eps,
            rope,
            position,
            step.slot.flatten(),
            c.rotary.interleaved,
        )
        mixed = ops.mla_attention(
            query.view(*step.token.shape, *query.shape[1:]),
            cache,
            step.block_table,
            step.context,
            step.ancestors,
            c.kv_lora_rank,
            c.scale,
        )
        return self.o_proj(self.w_uv(mixed.flatten(0, 1)).flatten(1))
