"""What the benchmarks share: the clock, floors, and results files.

A results file, benchmarks/results/NAME.json, holds the machine's facts, with the bandwidth and the
peak measured in the same run, and rows. A row of an op holds op, shape (letters of csrc/kdtree.h),
dtype (of the activations), weights ("int4" or "bf16", where there are any), us, floor_us (the least
time of its bytes and flops, as the kernel's header states them), baseline (its name) and
baseline_us.
"""

import argparse
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kdtree.cli.machine import Peaks, header, peaks, write_results
from kdtree.cli.machine import time_us as time

__all__ = [
    "Peaks",
    "arguments",
    "close",
    "default_device",
    "floor",
    "header",
    "peaks",
    "time",
    "write",
]

RESULTS = Path(__file__).parent / "results"
# Of the norm of a result: far above what rounding costs at these sizes, far below what a wrong term
# does. The tight bounds are the tests'.
ERROR = {torch.float32: 1e-4, torch.bfloat16: 1.5e-2}


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--device", type=torch.device, default=default_device())
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    parser.add_argument("--commit", help="of the sources, where they are no repository")
    return parser


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def floor(bytes: float, flops: float, peaks: Peaks) -> float:
    """The least microseconds that so many bytes of memory and so many flops take."""
    return 1e6 * max(bytes / peaks.bandwidth, flops / peaks.peak)


def close(name: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Asserts that a result is right, before its time is taken. dtype: of the activations"""
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < ERROR[dtype], f"{name}: relative error {error:.2g}"


def write(
    name: str,
    rows: list[dict],
    header: dict,
    directory: Path = RESULTS,
    columns: tuple[str, ...] = (),
) -> Path:
    """Writes NAME.json and prints a table for each kind of row. columns: to print, all if none"""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    write_results(path, rows, header)
    console = Console(highlight=False, width=None if Console().is_terminal else 160)
    console.print(
        f"{header['card']}, torch {header['torch']}: {header['bandwidth'] / 1e9:.0f} GB/s and "
        f"{header['peak'] / 1e12:.2f} Tflop/s measured"
    )
    for _, group in groupby(map(_printed, rows), key=lambda row: row.get("kind")):
        group = list(group)
        names = [key for key in group[0] if not columns or key in columns]
        table = Table(*names)
        for row in group:
            table.add_row(*(_cell(row[key]) for key in names))
        console.print(table)
    return path


def _printed(row: dict) -> dict:
    """The row, and how much of what is possible it reaches."""
    return row | {"of floor": f"{row['floor_us'] / row['us']:.0%}"} if "us" in row else row


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
