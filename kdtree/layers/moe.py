"""Feed-forward layers: a dense gated MLP, and routed experts with shared ones beside them."""

import torch
from torch import Tensor, nn

from kdtree import ops
from kdtree.config import MoeConfig
from kdtree.layers.linear import Linear, frozen
from kdtree.weights import Weights


class Mlp(nn.Module):
    """down(silu(gate x) * up x)"""

    def __init__(self, hidden: int, width: int, w: Weights):
        super().__init__()
        gate = w.take_matrix("gate_proj.weight", width, hidden)
        up = w.take_matrix("up_proj.weight", width, hidden)
        self.gate_up_proj = Linear(torch.cat([gate, up]))
        self.down_proj = Linear(w.take_matrix("down_proj.weight", hidden, width))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
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
    """The routed experts' matrices, stacked; INT4 where the checkpoint has them so."""

    def __init__(self, config: MoeConfig, hidden: int, w: Weights):
        super().__init__()
        banks = None
        for e in range(config.experts):
            expert = _expert(w.at(e), hidden, config.width)
            banks = banks or [t.new_empty((config.experts, *t.shape)) for t in expert]
            for bank, tensor in zip(banks, expert, strict=True):
                bank[e] = tensor
        self.gate_up, self.down = map(frozen, banks[:2])
        self.gate_up_scale, self.down_scale = map(frozen, banks[2:]) if banks[2:] else (None, None)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        return ops.moe_experts(
            x, ids, weights, self.gate_up, self.down, self.gate_up_scale, self.down_scale, shared
        )


def _expert(w: Weights, hidden: int, width: int) -> tuple[Tensor, ...]:
    """One expert's gate_up and down, and their scales where they are INT4."""
    if w.has("gate_proj.weight_packed"):
        gate, gate_scale = w.take_int4("gate_proj", width, hidden)
        up, up_scale = w.take_int4("up_proj", width, hidden)
        down, down_scale = w.take_int4("down_proj", hidden, width)
        return torch.cat([gate, up]), down, torch.cat([gate_scale, up_scale]), down_scale
    gate = w.take("gate_proj.weight", width, hidden)
    up = w.take("up_proj.weight", width, hidden)
    return torch.cat([gate, up]), w.take("down_proj.weight", hidden, width)


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
        ids, weights = self.gate(x, position)
        shared = self.shared_experts(x, position) if self.shared_experts else None
        return self.experts(x, ids, weights, shared)
