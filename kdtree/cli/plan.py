"""What a model takes on a number of GPUs, and how fast a step could be, before it is downloaded.

Reads a model directory's config and safetensors headers, or a config.json alone; no weights. Bytes
are decimal: 1 GB is 1e9. A step of one node is plain decoding of a token; a step of N nodes
verifies a draft tree.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kdtree.checks import whole
from kdtree.cli import options, units
from kdtree.options import fp8_cache
from kdtree.plan import Machine, Plan, Source, formulas, make_plan, read
from kdtree.plan.slice import ASSUMED, Projected, project, read_slice
from kdtree.plan.tensors import PARTS

CONTEXT = 8192  # tokens that floors are for, where the caller names none
BANDWIDTH = units.show(formulas.BANDWIDTH, "B/s")
PEAK = units.show(formulas.PEAK, "FLOP/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR|config.json")
    parser.add_argument(
        "--gpus", type=options.whole, default=1, metavar="N", help="that share the model"
    )
    parser.add_argument("--gpu-memory", default="141GB", metavar="SIZE", help="of each; 141GB")
    parser.add_argument(
        "--reserve", default="6GB", metavar="SIZE", help="of it, for all but weights and cache; 6GB"
    )
    parser.add_argument(
        "--context", type=options.whole, metavar="N", help=f"tokens before a step; {CONTEXT}"
    )
    parser.add_argument("--nodes", default="1,4,8,16,32,64", metavar="N,N", help="1,4,8,16,32,64")
    parser.add_argument("--bandwidth", default=BANDWIDTH, help=f"of memory; {BANDWIDTH}")
    parser.add_argument("--peak", default=PEAK, help=f"of bfloat16 products; {PEAK}")
    parser.add_argument(
        "--quantize", choices=("int4",), help="routed experts to INT4 when they are loaded"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, or fp8 for e4m3 latents")
    parser.add_argument(
        "--slice", type=Path, metavar="FILE", help="steps by a result of bench --shape as well"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    machine = Machine(
        gpus=whole("gpus", arguments.gpus, 1, 1024),
        memory=units.parse("gpu-memory", arguments.gpu_memory, "B", "141GB or 96GiB"),
        reserve=units.parse("reserve", arguments.reserve, "B", "6GB or 4GiB"),
        bandwidth=units.parse("bandwidth", arguments.bandwidth, "B/s", "4.42TB/s"),
        peak=units.parse("peak", arguments.peak, "FLOP/s", "690TFLOP/s"),
    )
    nodes = options.nodes(arguments.nodes)
    source = read(arguments.model)
    fp8 = fp8_cache(arguments.kv_cache_dtype, source.config)
    measured = arguments.slice and read_slice(arguments.slice)
    context = arguments.context
    if context is None:
        usual = min(CONTEXT, source.config.max_positions)
        context = measured["context"] if measured else usual
    made = make_plan(
        source.config,
        source.tensors,
        machine,
        context=whole("context", context, 1),
        nodes=nodes,
        int4=arguments.quantize == "int4",
        fp8=fp8,
    )
    projected = project(source.config, made, measured) if measured else []
    if arguments.json:
        print(json.dumps(_facts(arguments.model, source, made, projected)))
    else:
        where = measured.get("card", "one device") if measured else ""
        _show(arguments.model, source, made, projected, where)
    return 0


def _skipped(source: Source) -> dict[str, int]:
    """Bytes in the checkpoint that are no part of the text model, by what they are."""
    totals = {}
    for each in source.tensors:
        if each.part not in PARTS:
            totals[each.part] = totals.get(each.part, 0) + each.bytes
    return totals


def _facts(path: Path, source: Source, made: Plan, projected: list[Projected]) -> dict:
    return {
        "model": str(path),
        "from": "headers" if source.headers else "config",
        "disagreements": list(source.disagreements),
        "parameters": made.parameters,
        "stored_bytes": made.stored_bytes,
        "rank_bytes": made.rank_bytes,
        "skipped_bytes": _skipped(source),
        "cache_bytes_per_token": made.cache_bytes,
        "kv_cache_dtype": "fp8" if made.fp8 else "auto",
        "context": made.context,
        "longest_context": made.longest,
        "machine": asdict(made.machine),
        "parts": [asdict(part) for part in made.parts],
        "steps_ms": [
            asdict(step) | {"floor": step.read, "total": step.total} for step in made.steps
        ],
        "by_slice_ms": [asdict(step) for step in projected],
        "legal_sizes": list(made.legal),
        "sizes": [asdict(size) for size in made.sizes],
        "illegal_sizes": {str(ranks): list(why) for ranks, why in made.illegal.items()},
        "assumptions": _assumptions(made),
    }


def _show(path: Path, source: Source, made: Plan, projected: list[Projected], where: str) -> None:
    console = Console(highlight=False, markup=False)
    gpus, memory = made.machine.gpus, units.show(made.machine.memory, "B")
    origin = "its headers" if source.headers else "the config alone"
    console.print(
        f"{path}: {units.count(made.parameters)} parameters, "
        f"{units.show(made.stored_bytes, 'B')} stored, by {origin}"
    )
    for name, size in _skipped(source).items():
        console.print(f"{name}: {units.show(size, 'B')} in the checkpoint, not loaded")
    for line in source.disagreements:
        console.print(f"{line} (see kdtree inspect)", style="bold yellow")
    console.print(f"On {gpus} GPU{'s' * (gpus > 1)} of {memory}")
    console.print(_parts(made))
    stored = "FP8" if made.fp8 else "bfloat16"
    console.print(
        f"KV cache: {made.cache_bytes:,} bytes a token on every rank, in {stored}"
        + ("; latents are shared by all heads, so ranks do not divide it" if gpus > 1 else "")
    )
    console.print(_fit(source, made))
    console.print(f"\nA step in ms, {made.context:,} tokens of context, one sequence")
    console.print(_steps(made))
    if projected:
        console.print(f"The same by a slice that was measured on {where}")
        console.print(_projected(projected))
    console.print(f"Tensor-parallel sizes, legal: {', '.join(map(str, made.legal))}")
    console.print(_sizes(made))
    for line in _illegal(made):
        console.print(f"not {line}")
    for line in [*_assumptions(made), *([ASSUMED] if projected else [])]:
        console.print(f"- {line}")


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _parts(made: Plan) -> Table:
    first = made.steps[0]
    table = _table("part", "parameters", "stored as", "stored", "held as", "a rank", "read, ms")
    for part in made.parts:
        table.add_row(
            part.part,
            units.count(part.parameters),
            part.stored_as,
            units.show(part.stored_bytes, "B"),
            part.held_as,
            units.show(part.rank_bytes, "B"),
            _digits(first.weights.get(part.part, 0.0)),
        )
    totals = units.show(made.stored_bytes, "B"), units.show(made.rank_bytes, "B")
    table.add_section()
    table.add_row(
        "all",
        units.count(made.parameters),
        "",
        totals[0],
        "",
        totals[1],
        _digits(first.rest + first.routed),
    )
    return table


def _fit(source: Source, made: Plan) -> str:
    machine = made.machine
    if not made.longest:
        asked = units.show(made.rank_bytes + machine.reserve, "B")
        return (
            f"DOES NOT FIT: weights and reserve take {asked} a GPU, "
            f"it has {units.show(machine.memory, 'B')}"
        )
    line = f"Longest context that fits: {made.longest:,} tokens"
    if made.fitting > made.longest:
        line += f", the model's own limit; memory would hold {made.fitting:,}"
    if made.context > made.longest:
        line += f". The context asked for, {made.context:,}, DOES NOT FIT"
    return line


def _steps(made: Plan) -> Table:
    table = _table(
        "nodes", "experts", "routed", "rest", "context", "floor", "all-reduce", "step", "of one"
    )
    first = made.steps[0]
    for step in made.steps:
        times = step.routed, step.rest, step.context, step.read, step.all_reduce, step.total
        ratio = f"{step.total / first.total:.2f}" if first.nodes == 1 else ""
        experts = f"{step.experts:.1f}"
        table.add_row(str(step.nodes), experts, *map(_digits, times), ratio)
    return table


def _projected(projected: list[Projected]) -> Table:
    table, first = _table("nodes", "by ratio", "of one", "by excess", "of one"), projected[0]
    for step in projected:
        cells = []
        for ms, one in ((step.ratio, first.ratio), (step.excess, first.excess)):
            cells += [_digits(ms), f"{ms / one:.2f}" if first.nodes == 1 else ""]
        table.add_row(str(step.nodes), *cells)
    return table


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms >= 0.1 or not ms else f"{ms:.2g}"


def _sizes(made: Plan) -> Table:
    table = _table("ranks", "weights a rank", "longest context")
    for size in made.sizes:
        fits = f"{size.context:,}" if size.context else "does not fit"
        table.add_row(str(size.ranks), units.show(size.rank_bytes, "B"), fits)
    return table


def _illegal(made: Plan) -> Iterator[str]:
    """Sizes and the first reason against each."""
    ordered = sorted(made.illegal, key=lambda ranks: (made.illegal[ranks][0], ranks))
    for reason, sizes in groupby(ordered, key=lambda ranks: made.illegal[ranks][0]):
        yield f"{', '.join(map(str, sizes))}: {reason}"


def _assumptions(made: Plan) -> list[str]:
    machine = made.machine
    measured = "measured on an H200"
    bandwidth = f"reads, {measured}" if machine.bandwidth == formulas.BANDWIDTH else "as given"
    peak = measured if machine.peak == formulas.PEAK else "as given"
    lines = [
        f"floor: every byte once at {units.show(machine.bandwidth, 'B/s')} ({bandwidth}) or every "
        f"flop at {units.show(machine.peak, 'FLOP/s')} ({peak}), whichever takes longer; "
        "launches and activations left out",
        f"read: a part's weights, in a step of N = {made.steps[0].nodes}; routed, rest: the "
        "routed experts and all other weights; context: the cached latents",
        "experts: distinct ones a layer, E (1 - (1 - K/E)^N): uniform routing, assumed",
        f"reserve: {units.show(machine.reserve, 'B')} a GPU for all but weights and cache, assumed",
    ]
    if made.fp8:
        lines.append(
            "context in FP8: its bytes alone; widening them is left out, with which attention took "
            "longer than over bfloat16 on an H200 (64 heads, 131,072 tokens: 151 instead of 66 us)"
        )
    if machine.gpus > 1:
        lines += [
            f"all-reduce: {formulas.ALL_REDUCE_S * 1e6:.2f} us and "
            f"{units.show(formulas.ALL_REDUCE_RATE, 'B/s')}, measured between 2 H200s over NVLink; "
            f"assumed for {machine.gpus}",
            "a prediction: this version runs on one GPU, tensor parallelism is not built yet",
        ]
    return lines
