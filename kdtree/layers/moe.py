"""Feed-forward layers: a dense gated MLP, and routed experts with shared ones beside them."""

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.config import MoeConfig
from kdtree.layers.beside import beside
from kdtree.layers.linear import Linear, frozen, stored_linear
from kdtree.weights import Weights


class Mlp(nn.Module):
    """down(silu(gate x) * up x)"""

    def __init__(self, hidden: int, width: int, w: Weights):
        super().__init__()
        self.gate_up_proj = stored_linear(w, ["gate_proj", "up_proj"], width, hidden)
        self.down_proj = stored_linear(w, ["down_proj"], hidden, width)

    def forward(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """x: [T, D]; position: [T], which a dense layer has no use for."""
        return self.down_proj(ops.swiglu(self.gate_up_proj(x)))


class Router(nn.Module):
    """Each row's experts and their weights, in float32."""

    def __init__(self, config: MoeConfig, hidden: int, w: Weights):
        super().__init__()
        self.config = config
        self.proj = Linear(
            w.take("weight", config.experts, hidden, dtype=torch.float32), torch.float32
        )
        self.bias = None
        if config.bias:
            bias = w.take("e_score_correction_bias", config.experts, dtype=torch.float32)
            self.bias = frozen(bias)

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """x: [T, D]; position: [T], negative at padding; returns ids and weights [T, K]."""
        c = self.config
        return ops.moe_route(
            self.proj(x),
            self.bias,
            position,
            experts_per_token=c.experts_per_token,
            groups=c.groups,
            kept_groups=c.kept_groups,
            scoring=c.scoring,
            group_score=c.group_score,
            normalize=c.normalize,
            scale=c.scale,
        )


class Experts(nn.Module):
    """The routed experts' matrices, stacked; INT4 where they are stored or wanted so."""

    def __init__(self, config: MoeConfig, hidden: int, w: Weights):
        super().__init__()
        experts, width = range(config.experts), config.width
        gate_up = [f"{e}.{name}_proj" for e in experts for name in ("gate", "up")]
        down = [f"{e}.down_proj" for e in experts]
        self.gate_up, self.gate_up_scale = _bank(w, gate_up, 2, width, hidden)
        self.down, self.down_scale = _bank(w, down, 1, hidden, width)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return ops.moe_experts(
            x, ids, weights, self.gate_up, self.down, self.gate_up_scale, self.down_scale, shared
        )


def _bank(
    w: Weights, names: list[str], each: int, out: int, features: int
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Matrices [out, features] stacked, `each` to an expert, and their scales where they are INT4.

    If one expert is INT4 all are.
    """
    if w.quantize or w.has("0.gate_proj.weight_packed"):
        banks = w.take_int4_bank(names, out, features)
        return tuple(frozen(bank.unflatten(0, (-1, each)).flatten(1, 2)) for bank in banks)
    bank = w.take_bank([f"{name}.weight" for name in names], out, features)
    return frozen(bank.unflatten(0, (-1, each)).flatten(1, 2)), None


class Moe(nn.Module):
    """Routed experts' weighted sum, plus the shared experts."""

    def __init__(self, config: MoeConfig, hidden: int, w: Weights):
        super().__init__()
        self.gate = Router(config, hidden, w.at("gate"))
        self.experts = Experts(config, hidden, w.at("experts"))
        self.shared_experts = None
        shared = w.at("shared_experts")
        if config.shared:
            self.shared_experts = Mlp(hidden, config.shared * config.width, shared)
        elif shared.has("down_proj.weight"):
            Mlp(hidden, 0, shared)  # transformers stores no experts as matrices without elements

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x: [T, D]; position: [T], negative at padding; returns [T, D]."""
        if self.shared_experts is None:
            return self.experts(x, *self.gate(x, position), None)
        (ids, weights), shared = beside(
            lambda: self.gate(x, position), lambda: self.shared_experts(x), x.device
        )
        return self.experts(x, ids, weights, shared)
