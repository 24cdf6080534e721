"""Reads a Hugging Face config.json: every key by name, nothing guessed, nothing ignored unsaid."""

import json
from pathlib import Path

from kdtree.checks import is_whole
from kdtree.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig, YarnConfig
from kdtree.config.quantization import check_quantization
from kdtree.errors import ConfigError

FAMILIES = {"deepseek_v3": "deepseek_v3", "deepseek_v2": "deepseek_v2", "kimi_k2": "deepseek_v3"}
WRAPPERS = ("kimi_k25",)  # a text model under text_config, beside a vision tower
INNER_NORM_EPS = 1e-6  # what the reference code builds the two inner norms with

# Keys that change nothing here: training, other runtimes, or what the family fixes already.
_IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version auto_map use_cache
    attention_dropout initializer_range aux_loss_alpha seq_aux ep_size pretraining_tp id2label
    label2id bos_token_id pad_token_id num_key_value_heads head_dim qk_head_dim _name_or_path
    output_router_logits router_aux_loss_coef return_dict num_nextn_predict_layers
    num_mtp_layers""".split()
)


def load(directory: Path) -> ModelConfig:
    """Reads config.json and, where there is one, generation_config.json.

    Raises ConfigError as from_hf does, and where there is no config.json.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} has no config.json: it is not a model directory")
    generation = directory / "generation_config.json"
    return from_hf(_json(path), _json(generation) if generation.is_file() else None)


def from_hf(config: dict, generation: dict | None = None) -> ModelConfig:
    """Reads config.json and generation_config.json, as dicts, every key by name.

    Raises ConfigError on an architecture, key or value that is not supported.
    """
    wrapped = config.get("model_type") in WRAPPERS
    if wrapped:
        quantization = {k: v for k, v in config.items() if k == "quantization_config"}
        config = _Keys(config).mapping("text_config") | quantization
    keys = _Keys(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        supported = ", ".join((*FAMILIES, *WRAPPERS))
        raise ConfigError(f"model_type is {kind!r}, supported: {supported}")
    family = FAMILIES[kind]
    keys.one_of("hidden_act", ("silu",), "silu")
    keys.one_of("attention_bias", (False,), False)
    eos = (
        *_ids(keys.take("eos_token_id", ())),
        *_ids((generation or {}).get("eos_token_id") or ()),
    )
    layers = keys.whole("num_hidden_layers")
    model = ModelConfig(
        family=family,
        vocab=keys.whole("vocab_size"),
        hidden=keys.whole("hidden_size"),
        layers=layers,
        dense_width=keys.whole("intermediate_size"),
        norm_eps=keys.real("rms_norm_eps"),
        tied=keys.one_of("tie_word_embeddings", (False, True), False),
        max_positions=keys.whole("max_position_embeddings"),
        eos_ids=tuple(dict.fromkeys(eos)),
        mla=_mla(keys, family),
        moe=_moe(keys, family, layers),
        prefix="language_model." if wrapped else "",
        skipped=("vision_tower.", "mm_projector.") if wrapped else (),
    )
    check_quantization(keys.mapping("quantization_config"))
    beyond = [token for token in model.eos_ids if token >= model.vocab]
    if beyond:
        raise ConfigError(f"eos_token_id holds {beyond}, the vocabulary has {model.vocab}")
    if keys.unread():
        raise ConfigError(f"config.json has unsupported keys: {', '.join(keys.unread())}")
    return model


class _Keys:
    """The keys of a config, each read once by name."""

    def __init__(self, values: dict):
        self.values = dict(values)
        self.read = set()

    def take(self, name: str, *default):
        self.read.add(name)
        if self.values.get(name) is not None:
            return self.values[name]
        if default:
            return default[0]
        raise ConfigError(f"config.json has no {name!r}")

    def whole(self, name: str, *default, least: int = 1) -> int:
        value = self.take(name, *default)
        if default and value is default[0]:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}, wants an integer of at least {least}")
        return value

    def real(self, name: str, *default, least: float = 0.0) -> float:
        """A finite number above least, or a default."""
        value = self.take(name, *default)
        if default and value is default[0]:
            return float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least < value < 1e30:
            raise ConfigError(f"{name} is {value!r}, wants a finite number above {least}")
        return float(value)

    def mapping(self, name: str) -> dict:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}, wants an object")
        return value

    def one_of(self, name: str, options: tuple, *default):
        value = self.take(name, *default)
        if value not in options:
            raise ConfigError(f"{name} is {value!r}, supported: {', '.join(map(repr, options))}")
        return value

    def unread(self) -> list[str]:
        return sorted(set(self.values) - self.read - _IGNORED)


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, wants an object")
    return value


def _ids(value) -> tuple[int, ...]:
    value = () if value is None else value
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(is_whole(token) and token >= 0 for token in ids):
        raise ConfigError(f"eos_token_id is {value!r}, wants an id or a list of ids")
    return ids


def _mla(keys: _Keys, family: str) -> MlaConfig:
    rope = keys.whole("qk_rope_head_dim")
    if rope % 2:
        raise ConfigError(f"qk_rope_head_dim is {rope}, wants an even number")
    interleaved = keys.one_of("rope_interleave", (True, False), True)
    return MlaConfig(
        heads=keys.whole("num_attention_heads"),
        q_lora_rank=keys.whole("q_lora_rank", None, least=0) or None,
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope=keys.whole("qk_nope_head_dim"),
        rope=rope,
        value=keys.whole("v_head_dim"),
        norm_eps=INNER_NORM_EPS,
        rotary=_rope(keys, interleaved),
    )


def _rope(keys: _Keys, interleaved: bool) -> RopeConfig:
    """Reads both spellings: rope_theta with rope_scaling, and rope_parameters."""
    parameters = keys.mapping("rope_parameters")
    rope = _Keys(parameters or keys.mapping("rope_scaling"))
    outer = _Keys({"rope_theta": keys.take("rope_theta", None)})
    theta = (rope if "rope_theta" in parameters else outer).real("rope_theta", least=1)
    kind = rope.take("rope_type", rope.take("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"rope_type is {kind!r}, supported: 'default', 'yarn'")
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
    if rope.unread():
        raise ConfigError(f"rope parameters have unsupported keys: {', '.join(rope.unread())}")
    return RopeConfig(float(theta), interleaved, yarn)


def _moe(keys: _Keys, family: str, layers: int) -> MoeConfig | None:
    v3 = family == "deepseek_v3"
    experts = keys.whole("n_routed_experts", None)
    first = keys.whole("first_k_dense_replace", 0, least=0)
    keys.one_of("moe_layer_freq", (1,), 1)
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    method = keys.one_of("topk_method", methods, methods[0])
    scoring = "sigmoid" if v3 else "softmax"
    keys.one_of("scoring_func", (scoring,), scoring)
    groups, kept = keys.whole("n_group", 1), keys.whole("topk_group", 1)
    shared = keys.whole("n_shared_experts", 0, least=0)
    rest = {
        "experts_per_token": keys.whole("num_experts_per_tok", None),
        "width": keys.whole("moe_intermediate_size", None),
        "normalize": keys.one_of("norm_topk_prob", (True, False), v3),
        "scale": keys.real("routed_scaling_factor", 1.0),
    }
    if experts is None or first >= layers:
        return None
    for name, value in rest.items():
        if value is None:
            raise ConfigError(f"config.json has {experts} routed experts but no {name}")
    if not v3 and rest["normalize"]:
        raise ConfigError("norm_topk_prob is True, supported with deepseek_v2: False")
    if method == "greedy":
        groups = kept = 1
    k = rest["experts_per_token"]
    if experts % groups or kept > groups or kept * (experts // groups) < k:
        raise ConfigError(
            f"{kept} of {groups} groups of {experts} experts cannot give {k} experts a token"
        )
    return MoeConfig(
        experts=experts,
        shared=shared,
        first_layer=first,
        groups=groups,
        kept_groups=kept,
        scoring=scoring,
        group_score="sum2" if v3 else "max",
        bias=v3,
        **rest,
    )
