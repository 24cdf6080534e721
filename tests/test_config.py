"""Metadata: every key read by name, what is not supported refused with what is."""

import json
import math

import pytest
from variants import variant

from kdtree import ConfigError
from kdtree.config import YarnConfig, from_hf


@pytest.fixture
def hf() -> dict:
    return json.loads((variant("base") / "config.json").read_text())


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "llama"},
            "model_type is 'llama', supported: deepseek_v2, deepseek_v3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, supported: False"),
        ({"hidden_size": "256"}, "hidden_size is '256', wants an integer of at least 1"),
        ({"hidden_size": 2**62}, "hidden_size is 4.61169e.18, wants at most 16777216"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1e.06, wants at most 1024"),
        ({"n_routed_experts": 2**31}, "n_routed_experts is 2.14748e.09, wants at most 4096"),
        ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1e.09, wants at most"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, wants an even number"),
        ({"sliding_window": 5}, "unsupported keys: sliding_window"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', supported: 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, supported: 1"),
        ({"moe_layer_freq": True}, "moe_layer_freq is True, supported: 1"),
        ({"mlp_bias": True}, "mlp_bias is True, supported: False"),
        ({"architectures": ["LlamaForCausalLM"]}, "supported: DeepseekV3ForCausalLM"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures is 'DeepseekV3ForCausalLM'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy', supported: 'noaux_tc'"),
        ({"routed_scaling_factor": None}, "no 'routed_scaling_factor'"),
        ({"norm_topk_prob": None}, "no 'norm_topk_prob'"),
        ({"first_k_dense_replace": None}, "no 'first_k_dense_replace'"),
        ({"n_group": 16, "topk_group": 8}, "n_group is 16 with 16 experts, wants 2 or more"),
        ({"n_group": 4, "topk_group": None}, "no 'topk_group'"),
        ({"n_group": 8, "topk_group": 1}, "1 of 8 groups of 16 experts cannot give 4"),
        ({"n_group": 5}, "1 of 5 groups of 16 experts cannot give 4"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3', supported: 'default'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "no 'original_max_position_embeddings'"),
        ({"rope_theta": None, "rope_scaling": None}, "no 'rope_theta'"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, wants a finite number above 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', wants an object"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0, wants a finite number above 0"),
        ({"model_type": ["x"]}, "model_type is"),
        ({"eos_token_id": 10**6}, "the vocabulary has 512"),
        ({"eos_token_id": [True]}, "wants an id or a list of ids"),
        ({"quantization_config": "x"}, "quantization_config is 'x', wants an object"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq' None"),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "pack-quantized",
                    "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
                }
            },
            "group_0: num_bits is 3, supported: 4",
        ),
    ],
)
def test_refuses_what_it_does_not_support(hf, change, message):
    with pytest.raises(ConfigError, match=message):
        from_hf(hf | change)


@pytest.mark.parametrize("key", ["q_lora_rank", "n_shared_experts", "n_group"])
def test_null_says_something_where_absence_does_not(hf, key):
    from_hf(hf | {key: None, "topk_group": None})
    del hf[key]
    with pytest.raises(ConfigError, match=f"config.json has no '{key}', not even null"):
        from_hf(hf)


def test_null_and_zero_are_one_query_projection(hf):
    null, zero = (from_hf(hf | {"q_lora_rank": rank}) for rank in (None, 0))
    assert null == zero and null.mla.q_lora_rank is None


def test_unknown_keys_without_a_value_are_harmless(hf):
    assert from_hf(hf | {"sliding_window": None}) == from_hf(hf)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "change, first, second",
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2", "num_attention_heads is 4"),
        ({"qk_head_dim": 40}, "qk_head_dim is 40", r"qk_nope_head_dim \+ qk_rope_head_dim is 48"),
        ({"head_dim": 32}, "head_dim is 32", "qk_rope_head_dim is 16"),
        (
            {"num_nextn_predict_layers": 1, "num_mtp_layers": 2},
            "num_mtp_layers is 2",
            "num_nextn_predict_layers is 1",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e4}},
            "rope_parameters.rope_theta is 50000.0",
            "rope_theta is 10000.0",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling is RopeConfig.*YarnConfig",
            "rope_parameters is RopeConfig.*yarn=None",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": YARN | {"type": "default"}},
            "rope_scaling.type is 'default'",
            "rope_scaling.rope_type is 'yarn'",
        ),
    ],
)
def test_keys_that_contradict_each_other(hf, change, first, second):
    with pytest.raises(ConfigError, match=f"{first}.* where {second}"):
        from_hf(hf | change)


def test_deepseek_v2_weights_are_never_normalised_nor_rotated_by_halves():
    softmax = json.loads((variant("softmax-greedy") / "config.json").read_text())
    for key, value, supported in [
        ("norm_topk_prob", True, False),
        ("rope_interleave", False, True),
    ]:
        with pytest.raises(ConfigError, match=f"{key} is {value}, supported: {supported}"):
            from_hf(softmax | {key: value})


def test_end_of_sequence_ids_are_a_union(hf):
    assert from_hf(hf | {"eos_token_id": 5}, {"eos_token_id": [7, 5]}).eos_ids == (5, 7)
    assert from_hf(hf | {"eos_token_id": None}, {"eos_token_id": 9}).eos_ids == (9,)
    assert from_hf(hf | {"eos_token_id": None}).eos_ids == ()


def test_both_spellings_of_rope_are_one(hf):
    yarn = {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    }
    bare = {k: v for k, v in hf.items() if not k.startswith("rope_") or k == "rope_interleave"}
    old = from_hf(bare | {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", **yarn}})
    new = {"rope_type": "yarn", "rope_theta": 50000.0, **yarn}
    assert from_hf(bare | {"rope_parameters": new}) == old
    assert old.mla.rotary.theta == 50000


@pytest.mark.parametrize(
    "factor, mscale, all_dim, softmax, amplitude",
    [
        (64, 1.0, 1.0, 2.00474, 1.0),  # Kimi K2.5, K2.6
        (40, 1.0, 1.0, 1.873854, 1.0),  # DeepSeek-V3
        (40, 0.707, 0.707, 1.589626, 1.0),  # DeepSeek-V2-Lite
        (40, 1.0, 0.707, 1.589626, 1.08573),  # the two apart
        (40, 0, 0, 1.0, 0.1 * math.log(40) + 1),  # neither named
    ],
)
def test_yarn_corrections(factor, mscale, all_dim, softmax, amplitude):
    yarn = YarnConfig(factor, 4096, 32, 1, mscale, all_dim)
    assert yarn.softmax_factor == pytest.approx(softmax, rel=1e-5)
    assert yarn.amplitude == pytest.approx(amplitude, rel=1e-5)
