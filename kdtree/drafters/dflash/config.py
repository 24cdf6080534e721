"""Reads the config.json of a DFlash drafter: every key by name, nothing guessed."""

from dataclasses import dataclass
from pathlib import Path

from kdtree.checks import is_whole
from kdtree.config import ModelConfig, RopeConfig, read_json, read_rope
from kdtree.config.families import IGNORED
from kdtree.config.keys import LARGEST, Keys, agreed
from kdtree.config.quantization import check_quantization
from kdtree.errors import ConfigError
from kdtree.tree import MAX_DEPTH

ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
MOST_LAYERS = 64
MOST_HEAD = 256  # that ops.block_attention takes
DEFAULT_BLOCK = 16  # where a checkpoint names none
# Keys that change nothing here; layer_types says which layers have a window.
_IGNORED = IGNORED | {"max_window_layers", "use_sliding_window", "eos_token_id"}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Attention:
    """Of one layer. window: positions, 0 for none; causal: within the block"""

    window: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Convolution:
    """DFlash2's, around each sublayer. taps: slots that it reaches over; group: channels that
    share a kernel's dynamic part"""

    taps: int
    group: int


@dataclass(frozen=True, slots=True)
class Selector:
    """DFlash2's path selector. rank: of its edge scores; candidates: of a depth"""

    rank: int
    candidates: int


@dataclass(frozen=True, slots=True)
class Architecture:
    """A DFlash drafter, all of it from its checkpoint's metadata.

    block: slots, the last committed token's first; taps: target layers, as the features are joined
    embed_scale: of the block's embeddings; logit_scale, logit_cap: of its logits, cap 0 for none
    scores: kdtree_scores as it stands there, {} where it is absent
    """

    vocab: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head: int
    norm_eps: float
    rotary: RopeConfig
    attention: tuple[Attention, ...]
    block: int
    mask: int
    taps: tuple[int, ...]
    embed_scale: float
    logit_scale: float
    logit_cap: float
    convolution: Convolution | None
    selector: Selector | None
    scores: dict


def read(directory: Path, target: ModelConfig) -> Architecture:
    """Reads a drafter directory's config.json and checks it against the target.

    Raises ConfigError on keys and values that are not supported, and on a drafter of another model.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory} has no config.json: it is not a drafter directory")
    keys = Keys(read_json(path), _IGNORED)
    inner = Keys(keys.mapping("dflash_config"))
    found = _architecture(keys, inner)
    _check(found, target)
    for name, wants in (
        ("num_target_layers", target.layers),
        ("target_hidden_size", target.hidden),
    ):
        agreed({f"the model's {name}": wants, name: _either(keys, inner, name)})
    check_quantization(keys.mapping("quantization_config"))
    keys.refuse_unread("the drafter's config.json")
    inner.refuse_unread("dflash_config")
    return found


def _architecture(keys: Keys, inner: Keys) -> Architecture:
    keys.architecture(ARCHITECTURES)
    keys.one_of("hidden_act", ("silu",), "silu")
    keys.one_of("attention_bias", (False,), False)
    keys.one_of("mlp_bias", (False,), False)
    keys.one_of("tie_word_embeddings", (False,), False)
    inner.one_of("causal_head", (False,), False)
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    kv_heads = keys.whole("num_key_value_heads", heads)
    head = keys.whole("head_dim", hidden // heads)
    if heads % kv_heads or head % 2 or head > MOST_HEAD:
        raise ConfigError(
            f"num_attention_heads is {heads}, num_key_value_heads {kv_heads} and head_dim {head},"
            f" wants a multiple of the second and an even number of at most {MOST_HEAD}"
        )
    rotary = read_rope(keys, interleaved=False)
    keys.whole("max_position_embeddings", None)  # the rotary table is as long as the engine's
    return Architecture(
        vocab=keys.whole("vocab_size"),
        hidden=hidden,
        width=keys.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        norm_eps=keys.real("rms_norm_eps"),
        rotary=rotary,
        attention=_attention(keys),
        block=_whole(keys, inner, "block_size", DEFAULT_BLOCK, least=2, most=MAX_DEPTH + 1),
        mask=_whole(keys, inner, "mask_token_id", least=0),
        taps=_taps(keys, inner),
        embed_scale=_factor(keys, inner, "input_embedding_scale", 1.0),
        logit_scale=_factor(keys, inner, "output_multiplier", 1.0),
        logit_cap=_factor(keys, inner, "final_logit_softcapping", 0.0, least=-1e-30),
        convolution=_convolution(keys, inner, hidden),
        selector=_selector(keys, inner),
        scores=keys.mapping("kdtree_scores"),
    )


def _attention(keys: Keys) -> tuple[Attention, ...]:
    """Layers with a window are causal within the block where is_causal does not say otherwise."""
    layers = keys.whole("num_hidden_layers", most=MOST_LAYERS)
    kinds = keys.take("layer_types", [FULL] * layers)
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != layers:
        raise ConfigError(
            f"layer_types is {kinds!r}, wants {layers} entries, supported: {FULL}, {SLIDING}"
        )
    window = keys.whole("sliding_window", *() if SLIDING in kinds else (0,))
    causal = keys.one_of("is_causal", (True, False, None), None)
    return tuple(
        Attention(window if sliding else 0, sliding if causal is None else causal)
        for sliding in (kind == SLIDING for kind in kinds)
    )


def _either(keys: Keys, inner: Keys, name: str) -> object | None:
    """What stands under a name in config.json or in its dflash_config, or in both alike."""
    return agreed({name: keys.take(name, None), f"dflash_config.{name}": inner.take(name, None)})


def _whole(
    keys: Keys, inner: Keys, name: str, *default: int | None, least: int = 1, most: int = LARGEST
) -> int:
    found = _either(keys, inner, name)
    given = {} if found is None and default else {name: found}
    return Keys(given).whole(name, *default, least=least, most=most)


def _factor(keys: Keys, inner: Keys, name: str, default: float, least: float = 0.0) -> float:
    return Keys({name: _either(keys, inner, name)}).real(name, default, least=least)


def _taps(keys: Keys, inner: Keys) -> tuple[int, ...]:
    name = "target_layer_ids"
    ids = _either(keys, inner, name)
    listed = isinstance(ids, list) and ids and all(is_whole(i) and i >= 0 for i in ids)
    if not listed or sorted(set(ids)) != ids:
        raise ConfigError(f"{name} is {ids!r}, wants layers in ascending order")
    return tuple(ids)


def _convolution(keys: Keys, inner: Keys, hidden: int) -> Convolution | None:
    taps = _whole(keys, inner, "conv_kernel_size", None, most=MAX_DEPTH + 1)
    if taps is None:
        return None
    group = _whole(keys, inner, "conv_group_size")
    if hidden % group:
        raise ConfigError(f"conv_group_size is {group}, wants a divisor of hidden_size = {hidden}")
    return Convolution(taps, group)


def _selector(keys: Keys, inner: Keys) -> Selector | None:
    rank = _whole(keys, inner, "selector_rank", None)
    if rank is None:
        return None
    return Selector(rank, _whole(keys, inner, "selector_top_k", most=64))


def _check(found: Architecture, target: ModelConfig) -> None:
    """Refuses a drafter that was made for another model."""
    for name, has, wants in (
        ("hidden_size", found.hidden, target.hidden),
        ("vocab_size", found.vocab, target.vocab),
    ):
        if has != wants:
            raise ConfigError(f"the drafter's {name} is {has}, the model's {wants}")
    if found.mask >= target.vocab:
        raise ConfigError(f"mask_token_id is {found.mask}, the vocabulary has {target.vocab}")
    if found.taps[-1] >= target.layers:
        raise ConfigError(
            f"target_layer_ids holds {found.taps[-1]}, the model has {target.layers} layers"
        )
