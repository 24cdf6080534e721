"""The models that the oracle can make, each to trip one family of mistakes.

A variant is BASE with the named keys of config.json replaced, and what the generator itself needs.
"""

from dataclasses import dataclass, field

BASE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
}
V2 = {  # DeepSeek-V2 has neither a router bias nor the keys left out here
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "rope_interleave": None,
    "num_nextn_predict_layers": None,
}
DIMS = {
    "vocab_size": 331,
    "hidden_size": 205,
    "intermediate_size": 143,
    "moe_intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 73,
    "kv_lora_rank": 57,
    "qk_nope_head_dim": 21,
    "qk_rope_head_dim": 10,
    "v_head_dim": 27,
    "n_routed_experts": 13,
    "num_experts_per_tok": 3,
    "rms_norm_eps": 1e-6,
}
KIMI = SMALL | {
    "model_type": "kimi_k2",
    "moe_intermediate_size": 96,
    "n_routed_experts": 24,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Variant:
    about: str
    seed: int
    change: dict = field(default_factory=dict)  # of BASE; a None removes a key unless in NULLABLE
    theta: float = 10000.0
    yarn: dict | None = None  # factor, beta_*, mscale*, original_max_position_embeddings
    rope_spelling: str = "rope_scaling"  # or "rope_parameters"
    prompt: int = 24  # tokens
    format: str = "bf16"  # or f16, fp8 (all matrices of the layers), int4 (routed experts)
    wrapper: bool = False  # Kimi-K2.5's: text_config, language_model., a vision tower
    shards: int = 1
    embed_std: float = 1.0
    logit_std: float = 2.5
    latent_gain: float = 1.0  # of the latents before their norms
    kv_cache_dtype: str = "auto"  # or fp8: latents are read from e4m3
    router_gain: float = 1.5  # sigma of the router's logits
    bias: tuple[float, float] = (0.0, 0.15)  # mean and sigma of e_score_correction_bias

    def config(self) -> dict:
        """The text part of config.json, without rope and special ids."""
        merged = BASE | self.change
        return {k: v for k, v in merged.items() if v is not None or k in NULLABLE}


NULLABLE = {"q_lora_rank", "n_shared_experts", "n_group", "topk_group"}


def yarn(factor: float, original: int, beta_fast: float, **mscales: float) -> dict:
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        **mscales,
    }


def small(about: str, seed: int, change: dict | None = None, **options) -> Variant:
    return Variant(about, seed, SMALL | (change or {}), **options)


VARIANTS = {
    "base": Variant("the plain case: bf16, V3 router, no YaRN", 0),
    "dims": Variant("every dimension odd where legal, no two alike", 24, DIMS),
    "one-layer": small(
        "a single layer, MoE", 2, {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    ),
    "one-head": small("one head", 22, {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "heads-128": Variant(
        "128 tiny heads",
        13,
        SMALL
        | {"num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 128}
        | {"hidden_size": 64, "q_lora_rank": 24, "kv_lora_rank": 16}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        rope_spelling="rope_parameters",
    ),
    "dense": small("no MoE layer at all", 17, {"first_k_dense_replace": 3}),
    "wide-heads": small(
        "heads of 128 + 64 and 128 features, latents of 512, no MoE; a prompt of 150 tokens",
        1,
        {"first_k_dense_replace": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        prompt=150,
    ),
    "no-shared": small("n_shared_experts null", 13, {"n_shared_experts": None}),
    "two-shared": small("two shared experts as one wide MLP", 6, {"n_shared_experts": 2}),
    "q-lora-none": small("q_lora_rank null: a single q_proj", 9, {"q_lora_rank": None}),
    "v-dim": small(
        "value width 24 beside key width 40 + 16", 0, {"v_head_dim": 24, "qk_nope_head_dim": 40}
    ),
    "groups": small(
        "8 groups keep 4, all biased scores negative; a prompt of 100 tokens",
        93,
        {"n_routed_experts": 32, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4},
        bias=(-2.0, 0.2),
        prompt=100,
    ),
    "softmax-greedy": small(
        "V2-Lite's router and attention: softmax, no bias, weights not normalised, YaRN 0.707",
        159,
        V2
        | {"topk_method": "greedy", "routed_scaling_factor": 1.5, "n_group": None}
        | {"topk_group": None, "q_lora_rank": None, "n_shared_experts": 2},
        yarn=yarn(40.0, 64, 32, mscale=0.707, mscale_all_dim=0.707),
    ),
    "softmax-groups": small(
        "V2's router: the 3 of 8 groups with the best expert",
        70,
        V2
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 8,
            "topk_group": 3,
            "num_hidden_layers": 2,
        }
        | {"n_routed_experts": 32, "num_experts_per_tok": 6, "routed_scaling_factor": 3.0},
    ),
    "experts-384": Variant(
        "384 experts, 8 a token",
        31,
        SMALL
        | {"hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
        | {"n_routed_experts": 384, "num_experts_per_tok": 8},
        router_gain=2.0,
        bias=(0.0, 0.25),
    ),
    "bias-large": small(
        "bias about 12, many scores about 1e-8", 11, router_gain=9.0, bias=(12.0, 1.0)
    ),
    "tied": small("the head is the embedding", 21, {"tie_word_embeddings": True}, embed_std=0.22),
    "yarn": small(
        "mscale unlike mscale_all_dim; 150 tokens pass the original 64",
        15,
        {"qk_rope_head_dim": 32},
        yarn=yarn(8.0, 64, 4, mscale=1.0, mscale_all_dim=0.6),
        rope_spelling="rope_parameters",
        prompt=150,
    ),
    "yarn-plain": small(
        "YaRN without mscale keys: cos and sin scaled, the softmax not",
        34,
        yarn=yarn(16.0, 32, 32),
        prompt=70,
    ),
    "rope-halves": small("rope_interleave false", 2, {"rope_interleave": False}),
    "int4": small("routed experts in INT4, group 32", 13, format="int4"),
    "int4-odd": small(
        "INT4 widths 160 and 96: multiples of 32 alone",
        25,
        {"hidden_size": 160, "moe_intermediate_size": 96},
        format="int4",
        rope_spelling="rope_parameters",
    ),
    "fp8": small(
        "FP8 in blocks of 128, partial ones on every side: 192 = 128 + 64",
        0,
        {"hidden_size": 192, "intermediate_size": 144, "moe_intermediate_size": 160},
        format="fp8",
    ),
    "fp8-cache": small("latents cached in e4m3, a scale each", 18, kv_cache_dtype="fp8"),
    "f16": small("float16", 0, format="f16"),
    "vocab-odd": small("509 words", 32, {"vocab_size": 509}),
    "norm-tiny": small(
        "embeddings and latents so small that each eps matters, 1e-5 outside and 1e-6 inside",
        29,
        embed_std=3e-3,
        latent_gain=1e-3,
    ),
    "kimi": Variant(
        "Kimi-K2.6's form: text_config, prefix, vision tensors, INT4, 3 shards, YaRN 64, 8 of 24",
        2,
        KIMI,
        theta=50000.0,
        yarn=yarn(64.0, 16, 32, mscale=1.0, mscale_all_dim=1.0),
        format="int4",
        wrapper=True,
        shards=3,
    ),
}
