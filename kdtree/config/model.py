"""What a model is: dimensions and switches, all of them from its checkpoint's metadata."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN's stretch of the rotary frequencies (arXiv 2309.00071, with DeepSeek's two mscales)."""

    factor: float
    original: int  # positions before stretching
    beta_fast: float
    beta_slow: float
    mscale: float  # 0 where the config names none
    mscale_all_dim: float

    @property
    def amplitude(self) -> float:
        """The factor of the cosines and sines."""
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def softmax_factor(self) -> float:
        """The factor of the softmax scale."""
        return self._m(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _m(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    interleaved: bool  # pairs (2i, 2i + 1), else (i, i + R / 2)
    yarn: YarnConfig | None


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention: widths in features, norm_eps of the two inner norms."""

    heads: int
    q_lora_rank: int | None  # None where the query has one projection
    kv_lora_rank: int
    nope: int
    rope: int
    value: int
    norm_eps: float  # of the two inner norms
    rotary: RopeConfig

    @property
    def scale(self) -> float:
        """The softmax scale."""
        factor = self.rotary.yarn.softmax_factor if self.rotary.yarn else 1.0
        return (self.nope + self.rope) ** -0.5 * factor


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routing and routed experts, as ops.moe_route and ops.moe_experts take them."""

    experts: int
    experts_per_token: int
    width: int  # of a routed expert
    shared: int  # shared experts, one MLP of shared * width
    first_layer: int  # layers before it are dense
    groups: int
    kept_groups: int
    scoring: str  # "sigmoid" or "softmax"
    group_score: str  # "sum2" or "max"
    bias: bool  # a per-expert bias for the choice
    normalize: bool
    scale: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model of MLA layers, dense before moe.first_layer and with experts from there on.

    max_positions: tokens; eos_ids: of config.json and generation_config.json together
    """

    vocab: int
    hidden: int
    layers: int
    dense_width: int
    norm_eps: float
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]
    mla: MlaConfig
    moe: MoeConfig | None  # None where every layer is dense
    mtp_layers: int  # stored after the others, which predict further tokens: not run here
    prefix: str  # of the checkpoint's tensor names
    vision: tuple[str, ...]  # prefixes of tensors that are about images

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer >= self.moe.first_layer

    @property
    def mtp(self) -> tuple[str, ...]:
        """Prefixes of the multi-token prediction layers' tensors.

        One layer is allowed for where the config counts none: some checkpoints have it even so.
        """
        last = self.layers + max(self.mtp_layers, 1)
        return tuple(f"{self.prefix}model.layers.{i}." for i in range(self.layers, last))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Prefixes of tensors that are no part of the text model."""
        return (*self.vision, *self.mtp)
