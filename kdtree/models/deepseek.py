"""The DeepSeek family, V2 and V3: a layer is MLA, then a dense MLP or routed experts.

Module names are the checkpoint's, but for matrices that are stored apart and multiplied as one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kdtree.cache import KvCache, Step
from kdtree.config import ModelConfig
from kdtree.layers import Linear, Mla, Mlp, Moe, RmsNorm, rope_table
from kdtree.layers.linear import frozen
from kdtree.weights import Weights


class Layer(nn.Module):
    """The parameters of one layer; Deepseek.forward runs it."""

    def __init__(self, config: ModelConfig, index: int, w: Weights):
        super().__init__()
        c = config
        self.input_layernorm = RmsNorm(w.take("input_layernorm.weight", c.hidden), c.norm_eps)
        self.self_attn = Mla(c.mla, c.hidden, w.at("self_attn"))
        self.post_attention_layernorm = RmsNorm(
            w.take("post_attention_layernorm.weight", c.hidden), c.norm_eps
        )
        if c.is_moe(index):
            self.mlp = Moe(c.moe, c.hidden, w.at("mlp"))
        else:
            self.mlp = Mlp(c.hidden, c.dense_width, w.at("mlp"))


class Deepseek(nn.Module):
    """A model of the family.

    w: the tensors of its checkpoint; positions: rows of the rotary table, the longest sequence
    """

    def __init__(self, config: ModelConfig, w: Weights, positions: int):
        super().__init__()
        self.config = config
        model = w.at("model")
        self.embed_tokens = frozen(
            model.take_matrix("embed_tokens.weight", config.vocab, config.hidden)
        )
        self.layers = nn.ModuleList(
            Layer(config, i, model.at("layers").at(i)) for i in range(config.layers)
        )
        self.norm = RmsNorm(model.take("norm.weight", config.hidden), config.norm_eps)
        head = self.embed_tokens
        if not config.tied:
            head = w.take_matrix("lm_head.weight", config.vocab, config.hidden)
        self.lm_head = Linear(head, torch.float32)
        table = rope_table(config.mla.rotary, config.mla.rope, positions, w.device)
        self.register_buffer("rope", table, persistent=False)

    def forward(
        self, step: Step, cache: KvCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One forward of a placed tree; its rows are appended to the cache.

        taps: layers, ascending, whose output (the residual stream) is wanted
        returns the normed last hidden [B, N, D], and the taps side by side [B, N, len(taps) * D] or
        None
        """
        position = step.position.flatten()
        token = step.token.flatten().clamp(0, self.config.vocab - 1)  # a draft may be anything
        embedded = F.embedding(token, self.embed_tokens)
        y, stream, kept = embedded.to(cache.dtype), None, []
        for i, layer in enumerate(self.layers):
            y, stream = layer.input_layernorm(y, stream)
            if i - 1 in taps:
                kept.append(stream)
            y = layer.self_attn(y, self.rope, step, cache.data[i])
            y, stream = layer.post_attention_layernorm(y, stream)
            y = layer.mlp(y, position)
        y, stream = self.norm(y, stream)
        if self.config.layers - 1 in taps:
            kept.append(stream)
        shape = step.token.shape
        return y.view(*shape, -1), torch.cat(kept, 1).view(*shape, -1) if kept else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [B, N, D]; returns [B, N, W] float32."""
        return self.lm_head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
