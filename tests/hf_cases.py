"""The tiny models that transformers builds for the parity tests."""

from dataclasses import dataclass, field

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 160,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}


def heads(count: int) -> dict:
    return {"num_attention_heads": count, "num_key_value_heads": count}


def groups(experts: int, per_token: int, count: int, kept: int) -> dict:
    shape = {"n_routed_experts": experts, "num_experts_per_tok": per_token}
    return shape | {"n_group": count, "topk_group": kept}


def yarn(theta: float, factor: float, original: int, **more: float) -> dict:
    """rope_parameters of rope_type yarn."""
    stretch = {"factor": factor, "original_max_position_embeddings": original}
    rope = {"rope_type": "yarn", "rope_theta": theta, "beta_fast": 32.0, "beta_slow": 1.0}
    return {"rope_parameters": rope | stretch | more}


def plain(theta: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


@dataclass(frozen=True)
class Case:
    """A checkpoint: TINY with some keys replaced, and what config.json does not say."""

    change: dict = field(default_factory=dict)
    model: str = "DeepseekV3"
    saved_as: str | None = None  # model_type, where transformers has no class for it
    int4: bool = False
    bias: float = 0.0  # mean of e_score_correction_bias
    embed: float = 1.0  # sigma of the embeddings


V2 = {"norm_topk_prob": False, "q_lora_rank": None}
CASES = {
    "v3": Case(  # 8 groups keep 4, all biased scores negative
        groups(32, 8, 8, 4) | yarn(1e4, 40.0, 32, mscale=1.0, mscale_all_dim=1.0), bias=-2.0
    ),
    "v3-dims": Case(
        {"vocab_size": 331, "hidden_size": 205, "intermediate_size": 143, "kv_lora_rank": 57}
        | {"moe_intermediate_size": 45, "num_hidden_layers": 2, "q_lora_rank": 73, "v_head_dim": 27}
        | {"qk_nope_head_dim": 21, "qk_rope_head_dim": 10, "rms_norm_eps": 1e-3}
        | heads(5) | groups(15, 3, 3, 2) | yarn(5e4, 4.0, 48, mscale=1.0, mscale_all_dim=1.0)
    ),
    "kimi-k2": Case(
        {"n_routed_experts": 24, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827}
        | yarn(5e4, 32.0, 32, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0),
        saved_as="kimi_k2",
    ),
    "experts-384": Case(
        {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
        | {"hidden_size": 64, "num_hidden_layers": 2} | plain(5e4)
    ),
    "moonlight": Case(
        {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 2.446}
        | {"num_experts_per_tok": 6, "vocab_size": 509} | plain(5e4)
    ),
    "yarn-apart": Case(yarn(1e4, 8.0, 64, mscale=1.0, mscale_all_dim=0.6) | heads(1)),
    "yarn-bare": Case(yarn(1e4, 16.0, 32) | {"norm_topk_prob": False, "v_head_dim": 24}),
    "rope-halves": Case(
        {"rope_interleave": False, "qk_rope_head_dim": 24, "q_lora_rank": None}
        | yarn(1e4, 4.0, 64, mscale=0.5, mscale_all_dim=1.0) | heads(8)
    ),
    "tied": Case(
        {"tie_word_embeddings": True, "first_k_dense_replace": 2, "v_head_dim": 48} | plain(1e4),
        embed=0.22,
    ),
    "no-shared": Case(
        {"n_shared_experts": 0, "first_k_dense_replace": 0, "num_hidden_layers": 1} | plain(1e4)
    ),
    "one-of-8": Case(groups(8, 1, 1, 1) | plain(2e4)),
    "all-of-8": Case(groups(8, 8, 4, 4) | plain(2e4) | {"num_hidden_layers": 4}),
    "dense": Case({"first_k_dense_replace": 3, "intermediate_size": 144} | plain(1e4)),
    "v2-lite": Case(
        V2 | {"topk_method": "greedy", "n_shared_experts": 2, "routed_scaling_factor": 1.5}
        | yarn(1e4, 40.0, 32, mscale=0.707, mscale_all_dim=0.707),
        "DeepseekV2",
    ),
    "v2": Case(
        V2 | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
        | {"q_lora_rank": 40, "v_head_dim": 24, "qk_nope_head_dim": 40} | groups(32, 6, 8, 3)
        | yarn(1e4, 40.0, 48, mscale=0.707, mscale_all_dim=0.707),
        "DeepseekV2",
    ),
    "kimi-k25": Case(
        {"n_routed_experts": 24, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827}
        | yarn(5e4, 64.0, 32, mscale=1.0, mscale_all_dim=1.0),
        "Kimi_K25",
    ),
    "int4": Case(
        {"moe_intermediate_size": 96, "hidden_size": 160} | groups(16, 4, 4, 2)
        | yarn(1e4, 40.0, 32, mscale=1.0, mscale_all_dim=1.0),
        int4=True,
    ),
    "v2-int4": Case(
        V2 | {"topk_method": "greedy", "hidden_size": 96, "moe_intermediate_size": 32} | plain(1e4),
        "DeepseekV2",
        int4=True,
    ),
    "kimi-k25-int4": Case(
        {"n_routed_experts": 24, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827}
        | yarn(5e4, 64.0, 32, mscale=1.0, mscale_all_dim=1.0),
        "Kimi_K25",
        int4=True,
    ),
}  # fmt: skip
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
