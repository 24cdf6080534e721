"""Reads a Hugging Face config.json: every key by name, nothing guessed, nothing ignored unsaid."""

from pathlib import Path

from kdtree.checks import is_whole
from kdtree.config.families import (
    FAMILIES,
    IGNORED,
    IGNORED_OF_WRAPPERS,
    WRAPPERS,
    Family,
    Wrapper,
)
from kdtree.config.keys import Keys, agreed
from kdtree.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig, YarnConfig
from kdtree.config.quantization import check_quantization
from kdtree.errors import ConfigError
from kdtree.files import has_file, read_object

MOST_LAYERS, MOST_EXPERTS = 1 << 10, 1 << 12  # tensors are named one by one before any is seen
INNER_NORM_EPS = 1e-6  # what the reference code builds the two inner norms with


def load(directory: Path) -> ModelConfig:
    """Reads config.json and, where there is one, generation_config.json.

    Raises ConfigError as from_hf does, and where there is no config.json.
    """
    path = directory / "config.json"
    if not has_file(path, ConfigError):
        raise ConfigError(f"{directory} has no config.json: it is not a model directory")
    generation = directory / "generation_config.json"
    has_generation = has_file(generation, ConfigError)
    return from_hf(read_json(path), read_json(generation) if has_generation else None)


def from_hf(config: dict, generation: dict | None = None) -> ModelConfig:
    """Reads config.json and generation_config.json, as dicts, every key by name.

    Raises ConfigError on an architecture, key or value that is not supported, and on keys that
    contradict each other.
    """
    ends = [config, generation or {}]
    kind = config.get("model_type")
    wrapper = WRAPPERS.get(kind) if isinstance(kind, str) else None
    if wrapper:
        config = _text_config(config, wrapper)
        ends.insert(0, config)
    return _text_model(Keys(config, IGNORED), _end_ids(ends), wrapper)


def _text_config(config: dict, wrapper: Wrapper) -> dict:
    """The text model's config, out of a wrapper's."""
    keys = Keys(config, IGNORED_OF_WRAPPERS)
    keys.architecture(wrapper.architectures)
    text = keys.mapping("text_config")
    keys.take("eos_token_id", None)
    found = {
        "quantization_config": keys.mapping("quantization_config") or None,
        "text_config.quantization_config": text.get("quantization_config"),
    }
    keys.refuse_unread("config.json")
    return text | {"quantization_config": agreed(found)}


def _text_model(keys: Keys, eos_ids: tuple[int, ...], wrapper: Wrapper | None) -> ModelConfig:
    kind = keys.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = ", ".join((*FAMILIES, *WRAPPERS))
        raise ConfigError(f"model_type is {kind!r}, supported: {supported}")
    family = FAMILIES[kind]
    keys.architecture((family.architecture,))
    keys.take("eos_token_id", None)
    keys.one_of("hidden_act", ("silu",), "silu")
    keys.one_of("attention_bias", (False,), False)
    keys.one_of("mlp_bias", (False,), False)
    layers = keys.whole("num_hidden_layers", most=MOST_LAYERS)
    model = ModelConfig(
        vocab=keys.whole("vocab_size"),
        hidden=keys.whole("hidden_size"),
        layers=layers,
        dense_width=keys.whole("intermediate_size"),
        norm_eps=keys.real("rms_norm_eps"),
        tied=keys.one_of("tie_word_embeddings", (False, True), False),
        max_positions=keys.whole("max_position_embeddings"),
        eos_ids=eos_ids,
        mla=_mla(keys, family),
        moe=_moe(keys, family, layers),
        mtp_layers=_mtp_layers(keys),
        prefix=wrapper.prefix if wrapper else "",
        vision=wrapper.vision if wrapper else (),
    )
    check_quantization(keys.mapping("quantization_config"))
    beyond = [token for token in model.eos_ids if token >= model.vocab]
    if beyond:
        raise ConfigError(f"eos_token_id holds {beyond}, the vocabulary has {model.vocab}")
    keys.refuse_unread("config.json")
    return model


def read_json(path: Path) -> dict:
    """The object in a JSON file; raises ConfigError where there is none."""
    return read_object(path, ConfigError)


def _end_ids(configs: list[dict]) -> tuple[int, ...]:
    """The union of the configs' eos_token_id."""
    ids = [token for config in configs for token in _ids(config.get("eos_token_id"))]
    return tuple(dict.fromkeys(ids))


def _ids(value) -> tuple[int, ...]:
    value = () if value is None else value
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(is_whole(token) and token >= 0 for token in ids):
        raise ConfigError(f"eos_token_id is {value!r}, wants an id or a list of ids")
    return ids


def _mla(keys: Keys, family: Family) -> MlaConfig:
    heads = keys.whole("num_attention_heads")
    nope, rope = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim")
    if rope % 2:
        raise ConfigError(f"qk_rope_head_dim is {rope}, wants an even number")
    derived = {
        "num_key_value_heads": ("num_attention_heads", heads),
        "qk_head_dim": ("qk_nope_head_dim + qk_rope_head_dim", nope + rope),
        "head_dim": ("qk_rope_head_dim", rope),
    }
    for name, (of, value) in derived.items():
        agreed({of: value, name: keys.take(name, None)})
    keys.stated("q_lora_rank")
    return MlaConfig(
        heads=heads,
        q_lora_rank=keys.whole("q_lora_rank", None, least=0) or None,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope=nope,
        rope=rope,
        value=keys.whole("v_head_dim"),
        norm_eps=INNER_NORM_EPS,
        rotary=read_rope(keys, keys.one_of("rope_interleave", family.interleave, True)),
    )


def read_rope(keys: Keys, interleaved: bool) -> RopeConfig:
    """Reads both spellings: rope_theta with rope_scaling, and rope_parameters.

    Raises ConfigError.
    """
    theta = keys.take("rope_theta", None)
    spelled = {name: keys.mapping(name) for name in ("rope_parameters", "rope_scaling")}
    ropes = {
        name: _one_rope(name, values, theta, interleaved)
        for name, values in spelled.items()
        if values or not any(spelled.values())
    }
    return agreed(ropes)


def _one_rope(spelling: str, values: dict, theta: float | None, interleaved: bool) -> RopeConfig:
    rope = Keys(values)
    theta = agreed({"rope_theta": theta, f"{spelling}.rope_theta": rope.take("rope_theta", None)})
    theta = Keys({"rope_theta": theta}).real("rope_theta", least=1)
    kinds = {f"{spelling}.{name}": rope.take(name, None) for name in ("rope_type", "type")}
    kind = Keys({"rope_type": agreed(kinds)}).one_of("rope_type", ("default", "yarn"), "default")
    yarn = None
    if kind == "yarn":
        yarn = YarnConfig(
            factor=rope.real("factor", least=0.999),
            original=rope.whole("original_max_position_embeddings"),
            beta_fast=rope.real("beta_fast", 32),
            beta_slow=rope.real("beta_slow", 1),
            mscale=rope.real("mscale", 0),
            mscale_all_dim=rope.real("mscale_all_dim", 0),
        )
    rope.refuse_unread(spelling)
    return RopeConfig(theta, interleaved, yarn)


def _moe(keys: Keys, family: Family, layers: int) -> MoeConfig | None:
    keys.one_of("moe_layer_freq", (1,), 1)
    keys.one_of("scoring_func", (family.scoring,), family.scoring)
    keys.stated("n_shared_experts")
    experts = keys.whole("n_routed_experts", most=MOST_EXPERTS)
    k = keys.whole("num_experts_per_tok")
    groups, kept = _groups(keys, family, experts, k)
    moe = MoeConfig(
        experts=experts,
        experts_per_token=k,
        width=keys.whole("moe_intermediate_size"),
        shared=keys.whole("n_shared_experts", 0, least=0),
        first_layer=keys.whole("first_k_dense_replace", least=0),
        groups=groups,
        kept_groups=kept,
        scoring=family.scoring,
        group_score=family.group_score,
        bias=family.bias,
        normalize=keys.one_of("norm_topk_prob", family.normalize),
        scale=keys.real("routed_scaling_factor"),
    )
    return moe if moe.first_layer < layers else None


def _groups(keys: Keys, family: Family, experts: int, k: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may choose from."""
    method = keys.one_of("topk_method", family.methods, family.methods[0])
    keys.stated("n_group")
    groups = keys.whole("n_group", 1)
    kept = keys.whole("topk_group", *(1,) if groups == 1 else ())
    if method == "greedy":
        groups = kept = 1
    if experts % groups or kept > groups or kept * (experts // groups) < k:
        raise ConfigError(
            f"{kept} of {groups} groups of {experts} experts cannot give {k} experts a token"
        )
    if groups > 1 and family.group_score == "sum2" and experts == groups:
        raise ConfigError(f"n_group is {groups} with {experts} experts, wants 2 or more a group")
    return groups, kept


def _mtp_layers(keys: Keys) -> int:
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return agreed({name: keys.whole(name, None, least=0, most=MOST_LAYERS) for name in names}) or 0
