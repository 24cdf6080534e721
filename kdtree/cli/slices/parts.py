"""A forward taken apart by what it costs more than one with less in it.

Four forwards are timed, each with more of the model than the one before: no layers, the dense ones,
all of them, the head as well. A part's time is the difference of two, so the gaps between its
kernels and before the next part's are in it, and no part is measured alone with warm caches.
"""

from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from kdtree.cli.machine import Peaks
from kdtree.cli.slices import floors, timing
from kdtree.cli.slices.model import Slice
from kdtree.cli.slices.timing import Times, Trace
from kdtree.plan import formulas
from kdtree.plan.slice import DENSE, EXPERTS, HEAD, REST


@dataclass(frozen=True)
class Part:
    """One layer of a kind, the mean over those that there are; the head; or the rest.

    floor_us, bytes: None for the rest
    launches, traced_us, gaps, kernels: by a trace, None where the device cannot be traced; gaps is
        the share of traced_us in which nothing ran; kernels are (name, launches, us)
    """

    name: str
    us: float
    floor_us: float | None
    bytes: float | None
    launches: float | None
    traced_us: float | None
    gaps: float | None
    kernels: list[tuple[str, float, float]] | None

    @property
    def facts(self) -> dict[str, Any]:
        ratio = rate = None
        if self.floor_us is not None and self.us > 0:
            ratio, rate = self.us / self.floor_us, self.bytes / self.us / 1e3
        names = "name", "launches", "us"
        kernels = self.kernels
        if kernels is not None:
            kernels = [dict(zip(names, each, strict=True)) for each in kernels]
        return asdict(self) | {"ratio": ratio, "gb_per_s": rate, "kernels": kernels}


def row(made: Slice, nodes: int, peaks: Peaks) -> dict[str, Any]:
    """All figures of trees of N nodes."""
    device, config, trees = made.cache.data.device, made.model.config, made.trees(nodes)
    dense, layers = config.moe.first_layer if config.moe else config.layers, config.layers
    runs = [partial(made.forward, tree, b) for b, tree in enumerate(trees)]
    eager = timing.eager_us(runs, device)
    read = made.experts(trees)

    def timed(layers: int, head: bool = False) -> Times:
        with made.first(layers):
            return timing.measure([partial(run, head=head) for run in runs], device)

    none = timed(0)
    some = timed(dense) if dense else none
    most = timed(layers) if layers > dense else some
    all_ = timed(layers, head=True)
    works = [floors.layer(made, i, nodes, x, peaks) for i, x in enumerate([0.0] * dense + read)]
    head = floors.matrices(made.model.lm_head.parameters(), nodes, peaks)
    parts = [
        _part(REST, none, None, [], 1),
        *([_part(DENSE, some, none, works[:dense], dense)] if dense else []),
        *([_part(EXPERTS, most, some, works[dense:], layers - dense)] if layers > dense else []),
        _part(HEAD, all_, most, [head], 1),
    ]
    moe = config.moe
    return {
        "nodes": nodes,
        "experts": sum(read) / len(read) if read else None,
        "experts_by_layer": read,
        "experts_if_uniform": (
            formulas.distinct_experts(moe.experts, moe.experts_per_token, nodes) if moe else None
        ),
        "forward_us": all_.us,
        "eager_us": eager,
        "parts": [part.facts for part in parts],
    }


def _part(
    name: str, whole: Times, without: Times | None, works: list[floors.Work], count: int
) -> Part:
    us, trace = whole.us, whole.trace
    if without is not None:
        us -= without.us
        trace = trace and without.trace and trace.less(without.trace)
    us /= count
    trace = trace and trace.over(count)
    work = sum(works, floors.Work()) if works else None
    return Part(
        name=name,
        us=us,
        floor_us=work and 1e6 * work.seconds / count,
        bytes=work and work.bytes / count,
        launches=trace and trace.launches,
        gaps=trace and 1 - trace.busy_us / trace.us,
        traced_us=trace and trace.us,
        kernels=trace and _sorted(trace),
    )


def _sorted(trace: Trace) -> list[tuple[str, float, float]]:
    found = [(name, count, us) for name, (count, us) in trace.kernels.items()]
    return sorted(found, key=itemgetter(2), reverse=True)
