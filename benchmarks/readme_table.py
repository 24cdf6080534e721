"""Puts the engine's figures into README.md: what is between two marks there is made anew.

They come from results/engine_cpu.json and engine_cuda.json, as bench_engine.py wrote them.
"""

import itertools
import json
from pathlib import Path

from bench_engine import RUNS
from harness import RESULTS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- made by benchmarks/readme_table.py -->\n", "<!-- end -->\n"
SIDES = {"engine_cpu": "CPU", "engine_cuda": "H200"}  # results file and what it was run on
NAMES = {
    "none": "AR",
    "ngram": "prompt look-up",
    "dflash": "dflash",
    "oracle:1": "oracle always right",
}
TREES = {"chain": "chain of {}", "best-first": "tree of {}"}
MISSING = "–"


def figures(results: dict[str, dict]) -> str:
    """Markdown of the tables. results: by file name, as the benchmark writes them"""
    rows = {side: results[file]["rows"] for file, side in SIDES.items()}
    machines = (
        f"{side}: {results[file]['card']}, torch {results[file]['torch']}, "
        f"{results[file]['date'][:10]}."
        for file, side in SIDES.items()
    )
    return "\n".join((decode_table(rows), forward_table(rows), " ".join(machines) + "\n"))


def decode_table(rows: dict[str, list[dict]]) -> str:
    """A line a temperature and run: acceptance length, tokens/s and speed-up of each side."""
    columns = ("accepted, {}", "tokens/s, {}", "speed-up, {}")
    titles = [column.format(side) for side in rows for column in columns]
    found = {side: {_case(row): row for row in rows[side] if _is(row, "decode")} for side in rows}
    temperatures = sorted({case[0] for side in found.values() for case in side})
    lines = [["T", "drafter", *titles]]
    for T, run in itertools.product(temperatures, RUNS):
        cells = [cell for side in rows for cell in _decode_cells(found[side].get((T, *run)))]
        lines.append([f"{T:g}", _name(*run), *cells])
    return _table(lines)


def forward_table(rows: dict[str, list[dict]]) -> str:
    """A line a side: the milliseconds of a forward by its nodes."""
    found = {side: {r["N"]: r["ms"] for r in rows[side] if _is(r, "forward")} for side in rows}
    nodes = sorted({N for side in found.values() for N in side})
    lines = [["ms a forward of N nodes", *map(str, nodes)]]
    for side, ms in found.items():
        lines.append([side, *(f"{ms[N]:.1f}" if N in ms else MISSING for N in nodes)])
    return _table(lines)


def replaced(text: str, new: str) -> str:
    """The text with what is between the marks replaced."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md wants one line {BEGIN!r} and after it one {END!r}")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + new + "\n" + END + rest.partition(END)[2]


def load() -> dict[str, dict]:
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in SIDES}


def _is(row: dict, kind: str) -> bool:
    return row["kind"] == kind


def _case(row: dict) -> tuple:
    return row["temperature"], row["drafter"], row["tree"], row["budget"]


def _name(drafter: str, tree: str, budget: int | str) -> str:
    kind, _, accuracy = drafter.partition(":")
    name = NAMES.get(drafter) or f"{kind}, right {float(accuracy):.0%} of the time"
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
    README.write_text(replaced(README.read_text(), figures(load())))


if __name__ == "__main__":
    main()
