"""What a measured call is, and operands for it at a device's sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import harness
import torch
from torch import Tensor

from kdtree.cli.machine import MOST_CALLS

COLD = 256e6  # bytes that operands turn through: several times the second-level cache
EPS = 1e-6  # of the norms


@dataclass(frozen=True)
class Size:
    """A model's sizes, letters of csrc/kdtree.h, and the row counts and contexts to measure."""

    D: int
    H: int
    C: int
    R: int
    P: int
    E: int
    K: int
    F: int
    shard: int  # F of one of the cards that share the experts
    W: int
    Q: int  # q_lora_rank
    dense: int  # hidden width of a dense layer
    L: int
    rows: tuple[int, ...]
    batches: tuple[int, ...]  # rows of what streams weights, and of the router
    prefill: int  # rows of a chunk of a prompt
    contexts: tuple[int, ...]
    cached: tuple[int, ...]  # contexts of the latent cache
    nodes: tuple[int, ...]


KIMI = Size(
    D=7168, H=64, C=512, R=64, P=128, E=384, K=8, F=2048, shard=256, W=163840, Q=1536,
    dense=18432, L=61, rows=(1, 8, 64), batches=(1, 8, 16, 32, 64), prefill=2048,
    contexts=(4096, 32768),
    cached=(1024, 4096, 32768, 131072), nodes=(1, 8, 16, 64),
)  # fmt: skip
SMALL = Size(  # the demo model's
    D=256, H=8, C=128, R=16, P=32, E=24, K=4, F=128, shard=32, W=8192, Q=128, dense=768, L=8,
    rows=(1, 8), batches=(1, 8), prefill=32, contexts=(256,),
    cached=(256,), nodes=(1, 8),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row to be: a call that was checked, and what it must move and compute."""

    shape: dict[str, int]
    run: Callable[[], object]
    bytes: float
    flops: float
    baseline: tuple[str, Callable[[], object]] | None = None
    weights: str | None = None
    on_host: bool = False  # of the baseline: it cannot be captured


class Bench:
    """One device, its dtype and sizes; makes operands."""

    def __init__(self, device: torch.device):
        self.device = device
        cuda = device.type == "cuda"
        self.size = KIMI if cuda else SMALL
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.e = self.dtype.itemsize
        self.name = "bf16" if cuda else "f32"

    def close(self, name: str, got: Tensor, want: Tensor) -> None:
        harness.close(name, got, want, self.dtype)

    def rand(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, device=self.device, dtype=dtype or self.dtype)
        return x.mul_(scale) if scale != 1 else x

    def ints(self, *shape: int, high: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(high, shape, device=self.device, dtype=dtype)

    def tensor(self, data, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(data, device=self.device, dtype=dtype)

    def int4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of weights [..., O, I] whose products keep the size of their inputs."""
        *lead, I = shape
        codes = torch.randint(
            -(2**31), 2**31 - 1, (*lead, I // 8), device=self.device, dtype=torch.int32
        )
        scale = torch.rand(*lead, I // 32, device=self.device, dtype=self.dtype)
        return codes, scale.add_(0.5).mul_(I**-0.5 / 4.6)  # 4.6: deviation of -8 .. 7

    def rope(self) -> Tensor:
        angle = torch.rand(4096, self.size.R // 2, device=self.device) * 6.3
        return torch.cat([angle.cos(), angle.sin()], 1)

    def copies(self, x: Tensor) -> list[Tensor]:
        """x and as many clones as make it cold, as many at most as a graph has calls."""
        if self.device.type == "cpu":
            return [x]
        count = min(MOST_CALLS, 1 + int(COLD / (x.numel() * x.element_size())))
        return [x, *(x.clone() for _ in range(count - 1))]


def turning(f: Callable, *operands: list) -> Callable[[], object]:
    """f of the next of each list of operands at every call."""
    turns = [cycle(each) for each in operands]
    return lambda: f(*map(next, turns))
