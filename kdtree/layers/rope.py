"""Rotary position embedding: the table of cosines and sines, YaRN included."""

import math

import torch
from torch import Tensor

from kdtree.config import RopeConfig, YarnConfig


def rope_table(config: RopeConfig, width: int, positions: int, device) -> Tensor:
    """[positions, width] float32: width / 2 cosines, then width / 2 sines, computed in float64."""
    if torch.device(device).type == "meta":
        return torch.empty(positions, width, device=device)
    index = torch.arange(0, width, 2, dtype=torch.float64)
    frequency = config.theta ** -(index / width)
    amplitude = 1.0
    if config.yarn:
        frequency = _stretch(frequency, config.yarn, config.theta, width)
        amplitude = config.yarn.amplitude
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
    table = torch.cat([angle.cos(), angle.sin()], 1) * amplitude
    return table.to(device, torch.float32)


def rotate_halves(x: Tensor, rope: Tensor) -> Tensor:
    """x with the pairs (i, i + R / 2) of every head rotated, in float32 and rounded once.

    x: [T, H, R]; rope: [T, R] float32, the table's rows of the T positions; returns [T, H, R]
    """
    cosine, sine = rope[:, None].chunk(2, -1)
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(x.dtype)


def _stretch(frequency: Tensor, yarn: YarnConfig, theta: float, width: int) -> Tensor:
    """YaRN: slow frequencies are divided by the factor, fast ones kept, a ramp between.

    Source: arXiv 2309.00071, section 3.2.
    """

    def dimension(rotations: float) -> float:
        """The dimension that turns this often within the original length."""
        turn = yarn.original / (2 * math.pi * rotations)
        return width * math.log(turn) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - low) / span).clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)
