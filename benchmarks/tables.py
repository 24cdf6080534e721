"""Puts results into the documents: what is between two marks there is made anew.

README.md has the engine's figures, docs/scaleup.md some ops' at Kimi-K2.6's dimensions and those of
slices of large models, all as the benchmarks wrote them into results/.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from bench_engine import RUNS
from harness import RESULTS

from kdtree.plan import Machine, make_plan, read
from kdtree.plan.slice import DENSE, EXPERTS, HEAD, REST, project

ROOT = Path(__file__).parent.parent
SIDES = {"engine_cpu": "CPU", "engine_cuda": "H200"}  # results file and what it was run on
NAMES = {
    "none": "AR",
    "ngram": "prompt look-up",
    "dflash": "dflash",
    "oracle:1": "oracle always right",
}
TREES = {"chain": "chain of {}", "best-first": "tree of {}"}
SLICES = {"kimi-k2.6": "Kimi-K2.6", "deepseek-v3": "DeepSeek-V3"}  # results file slice_*
EIGHT = Machine(gpus=8, memory=141e9, reserve=6e9)
MISSING = "–"
KIMI: list[tuple[str, dict[str, int]]] = [
    *(("linear", {"T": T, "I": 8192, "O": 7168}) for T in (1, 8, 64)),
    *(("moe_experts", {"T": T, "D": 7168, "F": 2048, "E": 384, "K": 8}) for T in (1, 8, 64)),
    *(("mla_attention", {"B": 1, "H": 64, "S": 4096, "N": N}) for N in (1, 8, 64)),
    ("mla_attention", {"B": 1, "H": 8, "S": 32768, "N": 16}),
]


def engine() -> str:
    results = {side: _load(file) for file, side in SIDES.items()}
    rows = {side: found["rows"] for side, found in results.items()}
    machines = "".join(f"{side}: {_machine(found)}.\n" for side, found in results.items())
    tables = decode_table(rows), launches_table(rows["H200"]), forward_table(rows), machines
    return "\n".join(filter(None, tables))


def ops() -> str:
    found = _load("ops_cuda")
    speeds = f"{found['bandwidth'] / 1e12:.2f} TB/s and {found['peak'] / 1e12:.0f} TFLOP/s"
    return f"{ops_table(found['rows'])}\n{_machine(found)}: {speeds} in the same run.\n"


def slices() -> str:
    """A line a model and size: the parts of a slice beside their floors."""
    lines = [["slice of", "N", "experts", "MoE layer, us", "floor", "ratio", "GB/s", "launches"]]
    lines[0] += ["gaps", "dense layer (floor)", "head (floor)", "rest", "eager / graph"]
    found = {name: _load(f"slice_{name}") for name in SLICES}
    for name, results in found.items():
        lines += [[SLICES[name], *_slice_cells(row)] for row in results["rows"]]
    speeds = ", ".join(f"{each['bandwidth'] / 1e12:.2f}" for each in found.values())
    return f"{_table(lines)}\n{_machine(results)}: {speeds} TB/s in the same runs.\n"


def steps() -> str:
    """A line a model and size: a step of the whole on 8 GPUs, by its floor and by the slice."""
    lines = [["8 GPUs, ms a step", "N", "floor and all-reduces", "by ratio", "by excess"]]
    for name, title in SLICES.items():
        source, slice_ = read(ROOT / f"tests/data/{name}/config.json"), _load(f"slice_{name}")
        nodes = [row["nodes"] for row in slice_["rows"]]
        how = {"context": slice_["context"], "nodes": nodes, "int4": True}
        made = make_plan(source.config, source.tensors, EIGHT, **how)
        by_slice = project(source.config, made, slice_)
        for step, each in zip(made.steps, by_slice, strict=True):
            times = (f"{ms:.2f}" for ms in (step.total, each.ratio, each.excess))
            lines.append([title, str(step.nodes), *times])
    return _table(lines)


def _slice_cells(row: dict) -> list[str]:
    parts = {part["name"]: part for part in row["parts"]}
    moe = parts[EXPERTS]
    two = (f"{parts[kind]['us']:.0f} ({parts[kind]['floor_us']:.0f})" for kind in (DENSE, HEAD))
    return [
        str(row["nodes"]),
        f"{row['experts']:.1f}",
        f"{moe['us']:.0f}",
        f"{moe['floor_us']:.0f}",
        f"{moe['ratio']:.2f}",
        f"{moe['gb_per_s']:.0f}",
        f"{moe['launches']:.0f}",
        f"{moe['gaps']:.1%}",
        *two,
        f"{parts[REST]['us']:.0f}",
        f"{row['eager_us'] / row['forward_us']:.2f}",
    ]


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {  # by document and name of the mark
    ("README.md", "engine"): engine,
    ("docs/scaleup.md", "ops"): ops,
    ("docs/scaleup.md", "slices"): slices,
    ("docs/scaleup.md", "steps"): steps,
}


def decode_table(rows: dict[str, list[dict]]) -> str:
    """A line a temperature and run: acceptance length, tokens/s and speed-up of each side."""
    columns = ("accepted, {}", "tokens/s, {}", "speed-up, {}")
    titles = [column.format(side) for side in rows for column in columns]
    found = {side: _decodes(rows[side]) for side in rows}
    temperatures = sorted({case[0] for side in found.values() for case in side})
    lines = [["T", "drafter", *titles]]
    for T, run in itertools.product(temperatures, RUNS):
        cells = [cell for side in rows for cell in _decode_cells(found[side].get((T, *run)))]
        lines.append([f"{T:g}", _name(*run), *cells])
    return _table(lines)


def launches_table(rows: list[dict]) -> str:
    """A line a temperature and run that was launched both ways: what of a gain is fewer forwards,
    and what is less time a round. Nothing where none was."""
    each = "ms a round", "tokens/s"
    titles = (f"{title}, {how}" for title in each for how in ("op by op", "graph"))
    lines = [["T", "drafter", "accepted", *titles]]
    graphs, eager = (_decodes(r for r in rows if r.get("graphs") is how) for how in (True, False))
    for case, row in eager.items():
        pair = row, graphs[case]
        cells = [f"{row['acceptance_length']:.2f}"]
        cells += [f"{each['ms_per_round']:.2f}" for each in pair]
        cells += [f"{each['tokens_per_s']:.0f}" for each in pair]
        lines.append([f"{case[0]:g}", _name(*case[1:]), *cells])
    return _table(lines) if eager else ""


def forward_table(rows: dict[str, list[dict]]) -> str:
    """A line a side: the milliseconds of a forward by its nodes."""
    found = {side: {r["N"]: r["ms"] for r in rows[side] if r["kind"] == "forward"} for side in rows}
    nodes = sorted({N for side in found.values() for N in side})
    lines = [["ms a forward of N nodes", *map(str, nodes)]]
    for side, ms in found.items():
        lines.append([side, *(_ms(ms[N]) if N in ms else MISSING for N in nodes)])
    return _table(lines)


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"


def ops_table(rows: list[dict]) -> str:
    """A line a shape of KIMI: microseconds beside the floor."""
    found = {(row["op"], *row["shape"].items()): row for row in rows if row["dtype"] == "bfloat16"}
    lines = [["op", "shape", "weights", "us", "floor us"]]
    for op, shape in KIMI:
        row = found[(op, *shape.items())]
        letters = ", ".join(f"{letter} {n}" for letter, n in shape.items())
        times = f"{row['us']:.1f}", f"{row['floor_us']:.1f}"
        lines.append([f"`{op}`", letters, row["weights"] or "", *times])
    return _table(lines)


def replaced(text: str, name: str, new: str) -> str:
    """The text with what is between the marks of that name replaced. Raises ValueError."""
    begin, end = f"<!-- {name}: made by benchmarks/tables.py -->\n", f"<!-- {name}: end -->\n"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"the document wants one line {begin!r} and after it one {end!r}")
    before, _, rest = text.partition(begin)
    return before + begin + "\n" + new + "\n" + end + rest.partition(end)[2]


def _load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _machine(results: dict) -> str:
    return f"{results['card']}, torch {results['torch']}, {results['date'][:10]}"


def _decodes(rows: Iterable[dict]) -> dict[tuple, dict]:
    """By case, the first row of decoding."""
    found = {}
    for row in rows:
        if row["kind"] == "decode":
            found.setdefault(_case(row), row)
    return found


def _case(row: dict) -> tuple:
    return row["temperature"], row["drafter"], row["tree"], row["budget"]


def _name(drafter: str, tree: str, budget: int | str) -> str:
    kind, _, accuracy = drafter.partition(":")
    name = NAMES.get(drafter) or f"{kind} right {float(accuracy):.0%} of the time"
    if drafter == "none":
        return name
    return f"{name}, {'auto' if budget == 'auto' else TREES[tree].format(budget)}"


def _decode_cells(row: dict | None) -> list[str]:
    if row is None:
        return [MISSING] * 3
    numbers = ("acceptance_length", ".2f"), ("tokens_per_s", ".0f"), ("speedup", ".2f")
    return [format(row[key], places) for key, places in numbers]


def _table(lines: list[list[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in ruled)


def main() -> None:
    for (document, name), make in BLOCKS.items():
        path = ROOT / document
        path.write_text(replaced(path.read_text(), name, make()))


if __name__ == "__main__":
    main()
