"""Dimensions of released models, for measurements without their weights.

Only what shapes and routing depend on. Source: config.json of moonshotai/Kimi-K2.6 (text_config)
and of deepseek-ai/DeepSeek-V3.
"""

from pathlib import Path

from kdtree.config.hf import from_hf, load, read_json
from kdtree.config.model import ModelConfig
from kdtree.errors import ConfigError

_BOTH = {
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
SHAPES = {
    "kimi-k2.6": _BOTH
    | {
        "max_position_embeddings": 262144,
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _YARN | {"factor": 64},
        "rope_theta": 50000,
        "routed_scaling_factor": 2.827,
        "vocab_size": 163840,
    },
    "deepseek-v3": _BOTH
    | {
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": _YARN | {"factor": 40},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
}


def shape(name: str) -> ModelConfig:
    """The config of a known shape, of a model directory, or in a config.json.

    Raises ConfigError on what is none of them, and as from_hf does.
    """
    if name in SHAPES:
        return from_hf(SHAPES[name])
    path = Path(name)
    if path.is_dir():
        return load(path)
    if not path.is_file():
        known = ", ".join(SHAPES)
        raise ConfigError(
            f"shape is {name!r}, known: {known}; or a model directory, or a config.json"
        )
    return from_hf(read_json(path))
