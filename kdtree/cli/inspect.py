"""What a model directory holds, and all that is wrong with it.

Reads config, safetensors headers and text files: tensors by part and format, the config in the
library's terms, tokenizer and chat template. Exit code 1 if a tensor is missing, unused or
mis-shaped, or a text file does not load.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kdtree.cli import units
from kdtree.config import ModelConfig, load
from kdtree.errors import CheckpointError, ConfigError
from kdtree.models import Deepseek, check_skipped
from kdtree.plan import stored
from kdtree.plan.tensors import PARTS, Tensors
from kdtree.text import load_tokenizer, read_chat_templates, tokenizer_file
from kdtree.weights import Checkpoint, check

TEXT_FILES = (
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    directory = arguments.model
    config = load(directory)
    rows, problems = _read(directory, config)
    text, text_problems = _read_text(directory)
    problems += text_problems
    facts = {"model": str(directory), "config": asdict(config), "tensors": rows}
    facts |= text | {"problems": problems}
    if arguments.json:
        print(json.dumps(facts))
    else:
        _show(facts, config)
    return 1 if problems else 0


def _read(directory: Path, config: ModelConfig) -> tuple[list[dict], list[str]]:
    """Tensors by part and format, and everything that is wrong."""
    build = partial(Deepseek, config, positions=1)
    try:
        rows = _rows(stored(Checkpoint(directory, config.prefix), config))
        checkpoint = Checkpoint(directory, config.prefix, config.skipped)
    except CheckpointError as error:
        first, *rest = str(error).splitlines()  # the directory's name, then what is wrong with it
        return [], [line.strip() for line in rest] or [first]
    problems = check_skipped(config, checkpoint)
    return rows, problems + check(checkpoint, build, dtype=torch.bfloat16)


def _read_text(directory: Path) -> tuple[dict, list[str]]:
    """The text files that are there and what they hold, as far as it loads; why what does not."""
    problems = {}  # once, where several fail for one reason

    def tried(load: Callable, *arguments: object):
        try:
            return load(*arguments)
        except (CheckpointError, ConfigError) as error:
            problems[str(error)] = None

    tokenizer = tried(load_tokenizer, directory)
    facts = {
        "text_files": [name for name in TEXT_FILES if os.path.lexists(directory / name)],
        "tokenizer": tried(tokenizer_file, directory),
        "tokens": None if tokenizer is None else len(tokenizer),
        "chat_template": tried(read_chat_templates, directory) is not None,
    }
    return facts, list(problems)


def _rows(tensors: Iterator[Tensors]) -> list[dict]:
    rows = {}
    for each in tensors:
        row = rows.setdefault(
            (each.part, each.stored_as),
            {
                "part": each.part,
                "used": each.part in PARTS,
                "stored_as": each.stored_as,
                "dtypes": set(),
                "tensors": 0,
                "parameters": 0,
                "bytes": 0,
            },
        )
        row["dtypes"].add(each.dtype)
        row["tensors"] += each.count
        row["parameters"] += each.parameters
        row["bytes"] += each.bytes
    order = {part: index for index, part in enumerate(PARTS)}
    keys = sorted(rows, key=lambda key: (order.get(key[0], len(PARTS)), key))
    return [rows[key] | {"dtypes": sorted(rows[key]["dtypes"])} for key in keys]


def _show(facts: dict, config: ModelConfig) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(facts["model"])
    for name, values in _summary("model", config):
        console.print(f"{name}: {values}")
    table = Table("part", "stored as", "dtypes", "tensors", "parameters", "bytes", "")
    table.box, table.pad_edge = box.SIMPLE_HEAD, False
    for column in table.columns[3:6]:
        column.justify = "right"
    for row in facts["tensors"]:
        table.add_row(
            row["part"],
            row["stored_as"],
            ", ".join(row["dtypes"]),
            f"{row['tensors']:,}",
            units.count(row["parameters"]),
            units.show(row["bytes"], "B"),
            "" if row["used"] else "not used",
        )
    console.print(table)
    console.print(f"text files: {', '.join(facts['text_files']) or 'none'}")
    tokens = "" if facts["tokens"] is None else f" of {facts['tokens']:,} tokens"
    template = "a chat template" if facts["chat_template"] else "no chat template"
    console.print(f"tokenizer: {facts['tokenizer'] or 'none'}{tokens}, {template}")
    problems = facts["problems"]
    for problem in problems:
        console.print(f"PROBLEM: {problem}", style="bold red")
    console.print(f"{len(problems)} problem{'s' * (len(problems) != 1)}")


def _summary(name: str, config: object) -> Iterator[tuple[str, str]]:
    """A line of values for each dataclass, the outer before the inner."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    inner = {key: value for key, value in values.items() if is_dataclass(value)}
    yield name, ", ".join(f"{key} {value}" for key, value in values.items() if key not in inner)
    for key, value in inner.items():
        yield from _summary(key, value)
