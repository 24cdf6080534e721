"""Sizes, rotary angles and trained tensors of the demo model.

Weights of all layers lie in one float32 tensor a kind: [L, out, in], or M = L - 1 MoE layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; `small()` is for trying the whole path on a CPU."""

    words: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    q_lora: int = 128
    kv_lora: int = 128
    nope: int = 32
    rope: int = 16
    value: int = 32
    dense: int = 768
    experts: int = 24
    chosen: int = 4
    expert: int = 128
    routed_scale: float = 2.0
    theta: float = 10000.0
    yarn: float = 8.0
    original: int = 512
    eps: float = 1e-6

    @staticmethod
    def small() -> "Shape":
        return Shape(
            hidden=64,
            layers=3,
            heads=2,
            q_lora=32,
            kv_lora=32,
            dense=96,
            experts=8,
            chosen=2,
            expert=32,
        )

    @property
    def scale(self) -> float:
        """Of the attention scores: YaRN's correction enters squared."""
        return (self.nope + self.rope) ** -0.5 * (0.1 * math.log(self.yarn) + 1) ** 2


def rotary(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [T, R/2], of YaRN's interpolated frequencies."""
    half, log_base = shape.rope // 2, 2 * math.log(shape.theta)
    index = torch.arange(half, dtype=torch.float64)
    plain = shape.theta ** (-index / half)

    def turns_at(turns: float) -> float:
        return shape.rope * math.log(shape.original / (turns * 2 * math.pi)) / log_base

    low = max(math.floor(turns_at(32)), 0)
    high = min(math.ceil(turns_at(1)), shape.rope - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequency = plain / shape.yarn * ramp + plain * (1 - ramp)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)


class Weights(nn.Module):
    """Every trained tensor, float32. `bias` [M, E] is balanced by sign, not by gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s, moe = shape, shape.layers - 1
        self.shape = s

        def matrix(count: int, out: int, inside: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(count, out, inside) * gain * inside**-0.5)

        last = (2 * s.layers) ** -0.5  # on what adds to the residual stream
        self.embed = nn.Parameter(torch.randn(s.words, s.hidden) * 0.5)
        self.head = nn.Parameter(torch.randn(s.words, s.hidden) * 0.2 * s.hidden**-0.5)
        self.norm = nn.Parameter(torch.ones(s.hidden))
        self.input_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.post_norm = nn.Parameter(torch.ones(s.layers, s.hidden))
        self.q_norm = nn.Parameter(torch.ones(s.layers, s.q_lora))
        self.kv_norm = nn.Parameter(torch.ones(s.layers, s.kv_lora))
        self.q_a = matrix(s.layers, s.q_lora, s.hidden)
        self.q_b = matrix(s.layers, s.heads * (s.nope + s.rope), s.q_lora)
        self.kv_a = matrix(s.layers, s.kv_lora + s.rope, s.hidden)
        self.kv_b = matrix(s.layers, s.heads * (s.nope + s.value), s.kv_lora)
        self.o = matrix(s.layers, s.hidden, s.heads * s.value, last)
        self.dense_in = matrix(2, s.dense, s.hidden)  # gate, up
        self.dense_out = matrix(1, s.hidden, s.dense, last)
        self.shared_in = matrix(2 * moe, s.expert, s.hidden)
        self.shared_out = matrix(moe, s.hidden, s.expert, last)
        self.router = matrix(moe, s.experts, s.hidden)
        self.experts_in = nn.Parameter(
            matrix(moe * s.experts * 2, s.expert, s.hidden).view(
                moe, s.experts, 2 * s.expert, s.hidden
            )
        )  # gate rows, then up rows
        self.experts_out = nn.Parameter(
            matrix(moe * s.experts, s.hidden, s.expert, last).view(
                moe, s.experts, s.hidden, s.expert
            )
        )
        self.register_buffer("bias", torch.zeros(moe, s.experts))
