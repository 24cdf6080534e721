"""The figures of a slice, printed."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kdtree.cli import units
from kdtree.plan.slice import DENSE, EXPERTS, HEAD, REST

KERNELS = 24  # of a part that are printed; the JSON has all
UNTRACED = "launches, gaps and kernels: not measured, torch's profiler sees no device here"


def show(rows: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    console.print(
        f"{facts['card']}, torch {facts['torch']}: {facts['bandwidth'] / 1e9:.0f} GB/s and "
        f"{facts['peak'] / 1e12:.3g} Tflop/s measured"
    )
    console.print(
        f"{facts['shape']}: {facts['layers']} layers, {facts['dense_layers']} of them dense, and "
        f"the head; experts {facts['weights']}, {facts['dtype']}; "
        f"{units.show(facts['weight_bytes'], 'B')} of weights, "
        f"{facts['context']} tokens of context; {facts['seconds']:.1f} s in all"
    )
    console.print(_forwards(rows))
    for name in (EXPERTS, DENSE, HEAD):
        found = [(row, part) for row in rows for part in row["parts"] if part["name"] == name]
        if found:
            console.print(f"{name}, us")
            console.print(_parts(found))
    if any(part["kernels"] is None for row in rows for part in row["parts"]):
        console.print(UNTRACED)
        return
    for name in (EXPERTS, DENSE, HEAD, REST):
        found = [
            (row["nodes"], part["kernels"])
            for row in rows
            for part in row["parts"]
            if part["name"] == name
        ]
        if found:
            console.print(f"{name}: kernels, launches and us")
            console.print(_kernels(found))


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _forwards(rows: list[dict[str, Any]]) -> Table:
    table = _table("nodes", "forward us", *(DENSE, EXPERTS, HEAD, REST), "eager us", "eager/graph")
    for row in rows:
        us = {part["name"]: _us(part["us"]) for part in row["parts"]}
        each = (us.get(name, "") for name in (DENSE, EXPERTS, HEAD, REST))
        times = row["eager_us"] / row["forward_us"]
        cells = _us(row["forward_us"]), *each, _us(row["eager_us"]), f"{times:.2f}"
        table.add_row(str(row["nodes"]), *cells)
    return table


def _parts(found: list[tuple[dict, dict]]) -> Table:
    table = _table(
        "nodes", "experts", "if uniform", "us", "floor", "ratio", "GB/s", "launches", "gaps"
    )
    for row, part in found:
        routed = part["name"] == EXPERTS
        table.add_row(
            str(row["nodes"]),
            f"{row['experts']:.1f}" if routed else "",
            f"{row['experts_if_uniform']:.1f}" if routed else "",
            _us(part["us"]),
            _us(part["floor_us"]),
            "" if part["ratio"] is None else f"{part['ratio']:.2f}",
            "" if part["gb_per_s"] is None else f"{part['gb_per_s']:.0f}",
            "" if part["launches"] is None else f"{part['launches']:.1f}",
            "" if part["gaps"] is None else f"{part['gaps']:.1%}",
        )
    return table


def _kernels(found: list[tuple[int, list[dict]]]) -> Table:
    """A line a kernel, a column a size; those of the most time at any size."""
    most = {}
    for _, kernels in found:
        for kernel in kernels:
            most[kernel["name"]] = max(most.get(kernel["name"], 0.0), kernel["us"])
    table = _table("kernel", *(f"N = {nodes}" for nodes, _ in found))
    for name in sorted(most, key=most.get, reverse=True)[:KERNELS]:
        cells = []
        for _, kernels in found:
            own = [k for k in kernels if k["name"] == name]
            cells.append(f"{own[0]['launches']:.3g} x, {own[0]['us']:.1f}" if own else "")
        table.add_row(name, *cells)
    return table


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
