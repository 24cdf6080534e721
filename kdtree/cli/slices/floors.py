"""The least time of a slice's parts: every byte once, or every flop, whichever takes longer.

The formulas of `kdtree plan` with the bytes that are really held and the experts that are really
read. Activations, far below both, are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from kdtree.cli.machine import Peaks
from kdtree.cli.slices.model import Slice
from kdtree.layers import Moe
from kdtree.plan import formulas


@dataclass(frozen=True)
class Work:
    """bytes: read from memory; flops; seconds: the sum over products, each bound by one of them"""

    bytes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        seconds = self.seconds + other.seconds
        return Work(self.bytes + other.bytes, self.flops + other.flops, seconds)


def layer(made: Slice, index: int, nodes: int, experts: float, peaks: Peaks) -> Work:
    """One layer and N nodes. experts: distinct ones that it reads, 0 in a dense layer"""
    config, module = made.model.config, made.model.layers[index]
    routed = list(module.mlp.experts.parameters()) if isinstance(module.mlp, Moe) else []
    skip = set(map(id, routed))
    work = matrices((p for p in module.parameters() if id(p) not in skip), nodes, peaks)
    if routed:
        m = config.moe
        read = experts / m.experts * sum(p.nbytes for p in routed)
        flops = 2 * nodes * m.experts_per_token * 3 * config.hidden * m.width
        work += _work(read, flops, peaks)
    scale = made.cache.data.element_size() / formulas.LATENT
    latents = scale * formulas.attention_bytes(config, made.context)
    return work + _work(
        latents, formulas.attention_flops(config, made.context, nodes, ranks=1), peaks
    )


def matrices(parameters: Iterable[nn.Parameter], nodes: int, peaks: Peaks) -> Work:
    """Plain matrices, each read once and multiplied with every node; vectors are read only."""
    each = (_work(p.nbytes, 2 * nodes * p.numel() * (p.dim() > 1), peaks) for p in parameters)
    return sum(each, Work())


def _work(bytes: float, flops: float, peaks: Peaks) -> Work:
    return Work(bytes, flops, formulas.seconds(bytes, flops, peaks.bandwidth, peaks.peak))
