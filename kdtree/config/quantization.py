"""What a checkpoint says of its quantisation, checked.

Which tensors are quantised is read off the checkpoint itself.
"""

from collections.abc import Mapping

from kdtree.errors import ConfigError

# Keys that say which tensors are quantised, how the numbers were found, or what checks itself here.
_IGNORED = frozenset(
    """quant_method quantization_status global_compression_ratio ignore version config_groups
    modules_to_not_convert ignored_layers targets weights observer observer_kwargs block_structure
    scale_dtype zp_dtype""".split()
)
# The supported values of each key; None where the key may be absent.
_FP8 = {
    "fmt": ("e4m3", None),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic", None),  # of activations, which are not quantised here
    "scale_fmt": ("ue8m0", None),  # powers of two, stored in float32 like all other scales
}
_INT4 = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (32,),
    "dynamic": (False, None),
    "actorder": (None, False),
}
_GROUP = {
    "format": ("pack-quantized", None),
    "input_activations": (None,),
    "output_activations": (None,),
}
_PACKED = {
    "format": ("pack-quantized",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}


def check_quantization(config: dict) -> None:
    """config: config.json's quantization_config, or {} where it has none.

    Raises ConfigError on a format that is not supported.
    """
    if not config:
        return
    method, layout = config.get("quant_method"), config.get("format")
    if method == "fp8":
        _check("quantization_config", config, _FP8)
    elif (method, layout) == ("compressed-tensors", "pack-quantized"):
        _check("quantization_config", config, _PACKED)
        for name, group in _mapping("config_groups", config.get("config_groups")).items():
            _check(name, _mapping(name, group), _GROUP)
            _check(name, _mapping(f"{name}: weights", group.get("weights")), _INT4)
    else:
        raise ConfigError(
            f"quantization {method!r} {layout!r} is not supported, supported:"
            " 'compressed-tensors' 'pack-quantized', 'fp8'"
        )


def _mapping(name: str, value: object) -> dict:
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise ConfigError(f"{name} is {value!r}, wants an object")
    return value


def _check(where: str, config: dict, supported: Mapping[str, tuple]) -> None:
    known = _IGNORED | supported.keys()
    if unknown := sorted(key for key in config if key not in known and config[key] is not None):
        raise ConfigError(f"{where} has unsupported keys: {', '.join(unknown)}")
    for key, options in supported.items():
        value = config.get(key)
        if not any(value == option and type(value) is type(option) for option in options):
            wants = " or ".join(map(repr, options))
            raise ConfigError(f"{where}: {key} is {value!r}, supported: {wants}")
