"""What a config may say of quantisation, and what is refused."""

import json

import pytest
from says import says
from variants import variant

from kdtree import ConfigError
from kdtree.config import from_hf


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fmt": "e5m2"}, "fmt is 'e5m2', supported: 'e4m3'"),
        ({"weight_block_size": [64, 64]}, "weight_block_size is [64, 64], supported: [128, 128]"),
        ({"weight_block_size": None}, "weight_block_size is None, supported: [128, 128]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static', supported: 'dynamic'"),
        ({"scale_fmt": "x"}, "scale_fmt is 'x', supported: 'ue8m0'"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' None is not supported, supported:"),
        ({"bits": 8}, "quantization_config has unsupported keys: bits"),
        ({"scale_fmt": "ue8m0"}, None),
    ],
)
def test_fp8_configs(change, message):
    hf = json.loads((variant("fp8") / "config.json").read_text())
    hf["quantization_config"] |= change
    if message is None:
        from_hf(hf)
        return
    with says(ConfigError, message):
        from_hf(hf)


@pytest.mark.parametrize(
    "where, change, message",
    [
        ("weights", {"num_bits": 8}, "group_0: num_bits is 8, supported: 4"),
        ("weights", {"symmetric": False}, "group_0: symmetric is False, supported: True"),
        ("weights", {"actorder": "group"}, "group_0: actorder is 'group', supported: None"),
        ("weights", {"dynamic": True}, "group_0: dynamic is True, supported: False"),
        ("group", {"input_activations": {"num_bits": 8}}, "group_0: input_activations is {"),
        ("group", {"weights": 4}, "group_0: weights is 4, wants an object"),
        ("group", {"rotation": 1}, "group_0 has unsupported keys: rotation"),
        ("weights", {"zero_point": 3}, "group_0 has unsupported keys: zero_point"),
        ("all", {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported"),
        ("all", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {"),
        ("all", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is {"),
        ("all", {"transform_config": {"x": 1}}, "transform_config is {"),
        ("all", {"config_groups": []}, "config_groups is [], wants an object"),
        ("all", {"quantization_status": "compressed", "sparsity_config": {}}, None),
    ],
)
def test_int4_configs(where, change, message):
    hf = json.loads((variant("int4") / "config.json").read_text())
    group = hf["quantization_config"]["config_groups"]["group_0"]
    place = {"all": hf["quantization_config"], "group": group, "weights": group["weights"]}[where]
    place |= change
    if message is None:
        from_hf(hf)
        return
    with says(ConfigError, message):
        from_hf(hf)
