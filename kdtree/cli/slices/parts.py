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
    trees, moe = made.trees(nodes), made.model.config.moe
    runs = [partial(made.forward, tree, b) for b, tree in enumerate(trees)]
    eager = timing.eager_us(runs, made.cache.data.device)
    read = made.experts(trees)
    uniform = formulas.distinct_experts(moe.experts, moe.experts_per_token, nodes) if moe else None
    whole, parts = _parts(made, nodes, runs, read, peaks)
    return {
        "nodes": nodes,
        "experts": sum(read) / len(read) if read else None,
        "experts_by_layer": read,
        "experts_if_uniform": uniform,
        "forward_us": whole.us,
        "eager_us": eager,
        "parts": [part.facts for part in parts],
    }


def _parts(
    made: Slice, nodes: int, runs: list[partial], read: list[float], peaks: Peaks
) -> tuple[Times, list[Part]]:
    """The whole forward, and its parts. read: distinct experts of each layer that has any"""
    layers = len(made.model.layers)
    dense = layers - len(read)
    sizes = (0, False), (dense, False), (layers, False), (layers, True)
    forms = [[partial(run, layers=n, head=head) for run in runs] for n, head in sizes]
    none, some, most, whole = timing.measure(forms, made.cache.data.device)
    experts = [0.0] * dense + read
    works = [floors.layer(made, i, nodes, each, peaks) for i, each in enumerate(experts)]
    head = floors.matrices(made.model.lm_head.parameters(), nodes, peaks)
    parts = [_part(REST, none, None, [])]
    if dense:
        parts.append(_part(DENSE, some, none, works[:dense]))
    if read:
        parts.append(_part(EXPERTS, most, some, works[dense:]))
    return whole, [*parts, _part(HEAD, whole, most, [head])]


def _part(name: str, whole: Times, without: Times | None, works: list[floors.Work]) -> Part:
    """works: of each of the layers that are alike, or none where there is no floor"""
    us, trace, count = whole.us, whole.trace, max(len(works), 1)
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
