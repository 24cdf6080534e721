"""A tiny shape, and slices of it."""

import torch

from kdtree.cli.slices import model
from kdtree.cli.slices.model import Slice
from kdtree.config import from_hf
from kdtree.config.shapes import SHAPES

TINY = SHAPES["kimi-k2.6"] | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "n_routed_experts": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8192,
}


@torch.no_grad()
def made(layers=3, context=100, weights="random-int4", device="cpu") -> Slice:
    config = model.cut(from_hf(TINY), layers)
    return model.build(config, weights, context, torch.device(device), torch.float32)
