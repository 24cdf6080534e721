"""A model's tensors by part: as a checkpoint stores them, and as the engine holds them in bfloat16.

They come from safetensors headers or, where there are none, from the config alone.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kdtree.config import ModelConfig
from kdtree.errors import ConfigError
from kdtree.weights import Checkpoint, formats
from kdtree.weights.formats import CODES, FLOATS, GROUP, Stored

ROUTED = "routed experts"
PARTS = (
    "embedding",
    "attention",
    "dense MLP",
    "shared experts",
    "router",
    ROUTED,
    "norms",
    "head",
)
MTP = "MTP layers"
UNKNOWN = "unknown"
HELD = 2  # bytes of a bfloat16
# The first of these words in a tensor's name says its part.
_WORDS = {
    "experts": ROUTED,
    "shared_experts": "shared experts",
    "gate": "router",
    "mlp": "dense MLP",
    "self_attn": "attention",
    "embed_tokens": "embedding",
    "lm_head": "head",
    "input_layernorm": "norms",
    "post_attention_layernorm": "norms",
    "norm": "norms",
}
# Last words of the names of what INT4 and FP8 matrices are stored as, beside FP8's own "weight".
_INT4 = [f"weight{part.suffix}" for part in formats.int4((GROUP, GROUP))]
_PACKED, _SCALE, _ = _INT4
_FP8_SCALE = f"weight{formats.fp8((1, 1))[1].suffix}"
# What every tensor-parallel rank holds whole: too small to be worth a collective when divided.
_WHOLE_PARTS = ("router", "norms")
_WHOLE_NAMES = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")


@dataclass(frozen=True, slots=True)
class Tensors:
    """`count` tensors that are alike in all but their layer and expert.

    part: of PARTS; else it is no part of the text model: MTP, the name's first word, or UNKNOWN
    name: the last words of the stored name, "o_proj.weight_packed"
    dtype: as stored, in torch's spelling or, where torch is not told of it, safetensors'
    """

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int = 1

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """As stored."""
        bits = re.search(r"\d+", self.dtype)  # "bool" alone names none
        return self.elements * int(bits[0] if bits else 8) // 8

    @property
    def kind(self) -> str:
        """The last word of the name: weight, weight_packed, weight_scale, ..."""
        return self.name.rpartition(".")[2]

    @property
    def stored_as(self) -> str:
        """int4 or fp8, scales and shapes included, else the dtype."""
        if self.kind in _INT4:
            return "int4"
        if self.kind == _FP8_SCALE or self.dtype.lower().startswith(("f8", "float8")):
            return "fp8"
        return self.dtype

    @property
    def parameters(self) -> int:
        """Weights: codes counted one by one, scales and shapes not at all."""
        if self.kind == _PACKED:
            return CODES * self.elements
        return 0 if self.kind in (*_INT4, _FP8_SCALE) else self.elements

    def held_as(self, int4: bool) -> str:
        """In the engine's memory. int4: routed experts that are stored otherwise become INT4."""
        if self.part == "router":
            return "float32"
        if self.stored_as == "int4" or (int4 and self.part == ROUTED):
            return "int4"
        return "bfloat16"

    def held_bytes(self, int4: bool) -> int:
        """In the engine's memory, of all ranks' shares together. int4: as for held_as"""
        if self.kind == _SCALE:
            return HELD * self.elements
        if not self.parameters:
            return 0
        if self.part == "router":
            return 2 * HELD * self.elements
        if self.kind == _PACKED:
            return self.bytes
        if self.held_as(int4) == "int4":
            return self.elements // 2 + self.elements // GROUP * HELD
        return HELD * self.elements

    def share(self, ranks: int) -> int:
        """What a rank's share is to be multiplied with for the whole: ranks, or 1 if replicated."""
        whole = self.part in _WHOLE_PARTS or self.name.partition(".")[0] in _WHOLE_NAMES
        return 1 if whole else ranks


def stored(checkpoint: Checkpoint, config: ModelConfig) -> Iterator[Tensors]:
    """The tensors that headers name. checkpoint: opened without skipping any"""
    counts = Counter()
    for name, shape in checkpoint.shapes.items():
        kind = ".".join(name.split(".")[-2:])
        dtype = str(checkpoint.dtypes[name]).removeprefix("torch.")
        counts[_part(name, config), kind, shape, dtype] += 1
    yield from (Tensors(*alike, count) for alike, count in counts.items())


def _part(name: str, config: ModelConfig) -> str:
    words = name.split(".")
    layer = words[2] if words[:2] == ["model", "layers"] and len(words) > 3 else ""
    if layer.isdigit() and int(layer) >= config.layers:
        return MTP
    if name.startswith(config.skipped):
        return words[0]
    return next((part for word, part in _WORDS.items() if word in words), UNKNOWN)


def storage(config: dict) -> str:
    """How config.json says that matrices are stored: int4 (routed experts alone), fp8 or a dtype.

    config: its content, which kdtree.config.from_hf accepts
    """
    text = config.get("text_config") or config
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if quantization:
        return "fp8" if quantization["quant_method"] == "fp8" else "int4"
    dtype = text.get("dtype") or text.get("torch_dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype is {dtype!r}, supported: bfloat16, float16, float32")
    return dtype


def expected(config: ModelConfig, storage: str) -> Iterator[Tensors]:
    """The tensors that a checkpoint of this config holds, in the storage of that name."""
    dtype = storage if storage not in ("int4", "fp8") else "bfloat16"
    for part, name, shape, count in _matrices(config):
        for each in _stored_as(storage, part, shape):
            kind = dtype if each.dtypes == FLOATS else str(each.dtypes[0]).removeprefix("torch.")
            yield Tensors(part, f"{name}.weight{each.suffix}", each.shape, kind, count)
    for part, name, shape, count in _unquantized(config):
        kind = "float32" if name == "gate.e_score_correction_bias" else dtype
        yield Tensors(part, name, shape, kind, count)


def _stored_as(storage: str, part: str, shape: tuple[int, int]) -> tuple[Stored, ...]:
    if storage == "fp8":
        return formats.fp8(shape)
    return formats.int4(shape) if storage == "int4" and part == ROUTED else (Stored("", shape),)


def _matrices(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, int], int]]:
    """Part, name, shape and number of the matrices that FP8 checkpoints quantise."""
    c, a, m = config, config.mla, config.moe
    moe_layers = sum(map(c.is_moe, range(c.layers)))
    query = a.heads * (a.nope + a.rope)
    shapes = {"q_proj": (query, c.hidden)}
    if a.q_lora_rank:
        shapes = {"q_a_proj": (a.q_lora_rank, c.hidden), "q_b_proj": (query, a.q_lora_rank)}
    shapes["kv_a_proj_with_mqa"] = (a.kv_lora_rank + a.rope, c.hidden)
    shapes["kv_b_proj"] = (a.heads * (a.nope + a.value), a.kv_lora_rank)
    shapes["o_proj"] = (c.hidden, a.heads * a.value)
    yield from (("attention", name, shape, c.layers) for name, shape in shapes.items())
    mlps = [("dense MLP", c.dense_width, c.layers - moe_layers)]
    if m:
        mlps += [
            ("shared experts", m.shared * m.width, moe_layers),
            (ROUTED, m.width, moe_layers * m.experts),
        ]
    for part, width, count in mlps:
        if width and count:
            yield part, "gate_proj", (width, c.hidden), count
            yield part, "up_proj", (width, c.hidden), count
            yield part, "down_proj", (c.hidden, width), count


def _unquantized(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Part, name, shape and number of all other tensors."""
    c, a, m = config, config.mla, config.moe
    yield "embedding", "embed_tokens.weight", (c.vocab, c.hidden), 1
    if not c.tied:
        yield "head", "lm_head.weight", (c.vocab, c.hidden), 1
    yield "norms", "norm.weight", (c.hidden,), 1
    yield "norms", "input_layernorm.weight", (c.hidden,), c.layers
    yield "norms", "post_attention_layernorm.weight", (c.hidden,), c.layers
    yield "attention", "kv_a_layernorm.weight", (a.kv_lora_rank,), c.layers
    if a.q_lora_rank:
        yield "attention", "q_a_layernorm.weight", (a.q_lora_rank,), c.layers
    if m:
        moe_layers = sum(map(c.is_moe, range(c.layers)))
        yield "router", "gate.weight", (m.experts, c.hidden), moe_layers
        if m.bias:
            yield "router", "gate.e_score_correction_bias", (m.experts,), moe_layers
