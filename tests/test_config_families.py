"""The configs of released models: accepted as they are, and read right."""

from copy import deepcopy

import pytest
from hf_configs import (
    DEEPSEEK_R1,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    KIMI_K2,
    KIMI_K25,
    KIMI_K26,
    MOONLIGHT,
)

from kdtree import ConfigError
from kdtree.config import ModelConfig, YarnConfig, from_hf

# layers, hidden, dense width, heads, query rank | experts, a token, groups, kept, width, shared,
# first, scoring, normalize, scale | theta, YaRN factor, softmax scale | mtp, positions, end
EXPECTED = {
    "deepseek-v3": (
        DEEPSEEK_V3,
        (61, 7168, 18432, 128, 1536),
        (256, 8, 8, 4, 2048, 1, 3, "sigmoid", True, 2.5),
        (10000, 40, 0.1352338),
        (1, 163840, (1,)),
    ),
    "deepseek-r1": (
        DEEPSEEK_R1,
        (61, 7168, 18432, 128, 1536),
        (256, 8, 8, 4, 2048, 1, 3, "sigmoid", True, 2.5),
        (10000, 40, 0.1352338),
        (1, 163840, (1,)),
    ),
    "deepseek-v2": (
        DEEPSEEK_V2,
        (60, 5120, 12288, 128, 1536),
        (160, 6, 8, 3, 1536, 2, 1, "softmax", False, 16.0),
        (10000, 40, 0.1147214),
        (0, 163840, (100001,)),
    ),
    "deepseek-v2-lite": (
        DEEPSEEK_V2_LITE,
        (27, 2048, 10944, 16, None),
        (64, 6, 1, 1, 1408, 2, 1, "softmax", False, 1.0),
        (10000, 40, 0.1147214),
        (0, 163840, (100001,)),
    ),
    "moonlight": (
        MOONLIGHT,
        (27, 2048, 11264, 16, None),
        (64, 6, 1, 1, 1408, 2, 1, "sigmoid", True, 2.446),
        (50000, None, 0.0721688),
        (0, 8192, (163586,)),
    ),
    "kimi-k2": (
        KIMI_K2,
        (61, 7168, 18432, 64, 1536),
        (384, 8, 1, 1, 2048, 1, 1, "sigmoid", True, 2.827),
        (50000, 32, 0.1308608),  # 192 ** -0.5 * (0.1 ln 32 + 1) ** 2
        (0, 131072, (163585,)),
    ),
    "kimi-k2.5": (
        KIMI_K25,
        (61, 7168, 18432, 64, 1536),
        (384, 8, 1, 1, 2048, 1, 1, "sigmoid", True, 2.827),
        (50000, 64, 0.1446796),
        (0, 262144, (163585,)),
    ),
    "kimi-k2.6": (
        KIMI_K26,
        (61, 7168, 18432, 64, 1536),
        (384, 8, 1, 1, 2048, 1, 1, "sigmoid", True, 2.827),
        (50000, 64, 0.1446796),
        (0, 262144, (163586,)),
    ),
}


def dimensions(c: ModelConfig) -> tuple:
    return c.layers, c.hidden, c.dense_width, c.mla.heads, c.mla.q_lora_rank


def routing(c: ModelConfig) -> tuple:
    m = c.moe
    counts = (m.experts, m.experts_per_token, m.groups, m.kept_groups, m.width, m.shared)
    return (*counts, m.first_layer, m.scoring, m.normalize, m.scale)


@pytest.mark.parametrize("name", EXPECTED)
def test_released_configs_are_read_right(name):
    config, shape, moe, rope, rest = EXPECTED[name]
    model = from_hf(deepcopy(config))
    rotary, scale = model.mla.rotary, model.mla.scale
    assert dimensions(model) == shape
    assert routing(model) == moe
    assert (rotary.theta, rotary.yarn and rotary.yarn.factor) == rope[:2]
    assert scale == pytest.approx(rope[2], rel=1e-6)
    assert (model.mtp_layers, model.max_positions, model.eos_ids) == rest
    assert (model.mla.kv_lora_rank, model.mla.nope, model.mla.rope, model.mla.value) == (
        *(512, 128, 64),
        128,
    )
    assert rotary.interleaved and not model.tied and model.mla.norm_eps == 1e-6
    assert model.norm_eps == (1e-6 if "deepseek" in name else 1e-5)
    assert model.moe.bias == (moe[7] == "sigmoid")
    assert model.moe.group_score == ("sum2" if moe[7] == "sigmoid" else "max")
    wrapped = name in ("kimi-k2.5", "kimi-k2.6")
    assert model.prefix == ("language_model." if wrapped else "")
    assert model.vision == (("vision_tower.", "mm_projector.") if wrapped else ())
    assert model.mtp == (f"{model.prefix}model.layers.{shape[0]}.",)


def test_kimi_k2_ramps_over_one_dimension():
    assert from_hf(KIMI_K2).mla.rotary.yarn == YarnConfig(32, 4096, 1, 1, 1, 1)
    assert from_hf(KIMI_K26).mla.rotary.yarn == YarnConfig(64, 4096, 32, 1, 1, 1)


def test_end_of_sequence_ids_of_wrapper_text_and_generation_are_a_union():
    config = deepcopy(KIMI_K25)
    config["text_config"]["eos_token_id"] = [163585, 163593]
    model = from_hf(config, {"eos_token_id": 163586})
    assert model.eos_ids == (163585, 163593, 163586)


def test_the_text_model_says_whether_embeddings_are_tied():
    """transformers writes True into the wrapper of checkpoints that have a matrix of each."""
    assert not from_hf(KIMI_K25 | {"tie_word_embeddings": True}).tied


def test_text_config_alone_may_have_the_quantization():
    config = {k: v for k, v in KIMI_K25.items() if k != "quantization_config"}
    assert from_hf(config) == from_hf(KIMI_K25)


@pytest.mark.parametrize(
    "kind",
    ["deepseek", "deepseek_v32", "deepseek_v4", "kimi_k3", "kimi_linear", "kimi_vl", "llama", None],
)
def test_other_families_are_refused_by_name(kind):
    supported = "supported: deepseek_v2, deepseek_v3, kimi_k2, kimi_k25"
    with pytest.raises(ConfigError, match=f"model_type is {kind!r}, {supported}"):
        from_hf(DEEPSEEK_V3 | {"model_type": kind})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"new_key": 1}, "config.json has unsupported keys: new_key"),
        ({"text_config": None}, "model_type is None, supported"),
        ({"text_config": [1]}, r"text_config is \[1\], wants an object"),
        (
            {"architectures": ["KimiVL"]},
            r"\['KimiVL'\], supported: KimiK25ForConditionalGeneration",
        ),
        ({"quantization_config": {"format": "x"}}, r"text_config.quantization_config is \{.*'x'"),
    ],
)
def test_refuses_a_wrapper_that_it_does_not_know(change, message):
    with pytest.raises(ConfigError, match=message):
        from_hf(KIMI_K25 | change)
