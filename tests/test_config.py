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
        ({"model_type": "llama"}, "model_type is 'llama', supported: deepseek_v3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True, supported: False"),
        ({"hidden_size": "256"}, "hidden_size is '256', wants an integer of at least 1"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, wants an even number"),
        ({"sliding_window": 5}, "unsupported keys: sliding_window"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', supported: 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, supported: 1"),
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
