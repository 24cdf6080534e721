"""The header of a safetensors file: eight bytes of length, JSON, then the tensors' bytes.

Read here and not by the library, so that each offence is named, with its tensor, before any memory
is taken. Whatever is accepted here the library accepts too, and reads alike.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

LIMIT = 100_000_000  # bytes of JSON, the format's own limit; an index file is held to it too
MAX_DIMENSIONS = 16
LENGTH = 8  # bytes of the header's length
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class Entry(NamedTuple):
    """Where a tensor lies. dtype: safetensors' name; begin: of its bytes, from the file's start"""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def parse(text: bytes, found: Callable[[str], None]) -> object:
    """JSON as the standard has it: UTF-8, no NaN; calls found with every key that is there twice.

    Raises ValueError where it is none.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict:
        made = dict(pairs)
        if len(made) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            for key, count in counts.items():
                if count > 1:
                    found(key)
        return made

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(directory: Path, file: str) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a file by name, and everything that is wrong with it, each with the file."""
    path, problems = directory / file, []
    try:
        if not os.path.lexists(path):
            return {}, [f"{file} is missing: is the download complete?"]
        if not path.is_file():
            return {}, [f"{file} is no regular file"]
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH), "little")
            if size < LENGTH or length > size - LENGTH:
                wants = f"a header of {length} bytes" if size >= LENGTH else f"at least {LENGTH}"
                return {}, [f"{file} is truncated: it has {size} bytes, wants {wants}"]
            if length > LIMIT:
                return {}, [f"{file} has a header of {length} bytes, wants at most {LIMIT}"]
            text = stream.read(length)
        header = parse(text, lambda key: problems.append(f"{file} holds {shown(key)} twice"))
    except (OSError, ValueError) as error:
        return {}, [f"{file} is no safetensors file: {error}"]
    if not isinstance(header, dict) or text[:1] != b"{":
        return {}, [f"{file} is no safetensors file: its header is no JSON object"]
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        problems.append(f"{file}: __metadata__ is no object of strings")
    start, entries = LENGTH + length, {}
    for name, value in header.items():
        entry = _entry(file, start, value)
        if isinstance(entry, str):
            problems.append(f"{file}: {shown(name)} {entry}")
        elif not name.isprintable():
            problems.append(f"{file}: {shown(name)} is no name that can be printed")
        else:
            entries[name] = entry
    if not problems:
        problems = _layout(file, entries, start, size)
    return entries, problems


def shown(name: str) -> str:
    """A name as it can be printed: whatever a file may hold, it does not steer the terminal."""
    return name if name.isprintable() else ascii(name)


def _entry(file: str, start: int, value: object) -> Entry | str:
    """A tensor's entry, or what is wrong with it. start: of the data in the file"""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return "has no dtype, shape and data_offsets"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"has dtype {dtype!r:.40}, wants one of {', '.join(BITS)}"
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS:
        return f"has shape {shape!r:.80}, wants at most {MAX_DIMENSIONS} sizes"
    if not _sizes(offsets) or len(offsets) != 2:
        return f"has data_offsets {offsets!r:.80}, wants a begin and an end"
    begin, end = offsets
    nbytes = math.prod(shape) * BITS[dtype] // 8
    if end - begin != nbytes:
        return f"has {end - begin} bytes, wants {nbytes} for {dtype} {shape}"
    return Entry(file, dtype, tuple(shape), start + begin, nbytes)


def _sizes(value: object) -> bool:
    """A list of whole numbers that a file's size could be."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _layout(file: str, entries: dict[str, Entry], start: int, size: int) -> list[str]:
    """Tensors must cover the data exactly: no overlap, no gap, nothing beyond."""
    problems, end, last = [], start, None
    for name, entry in sorted(entries.items(), key=lambda item: item[1][3:]):
        if entry.begin < end:
            overlap = f"begins {end - entry.begin} bytes before {last} ends"
            problems.append(f"{file}: {name} {overlap}")
        elif entry.begin > end:
            after = f"after {last}" if last else "before it"
            problems.append(f"{file}: {name} leaves a gap of {entry.begin - end} bytes {after}")
        if last is None or entry.begin + entry.nbytes >= end:
            end, last = entry.begin + entry.nbytes, name
    if size < end:
        problems.append(f"{file} is truncated: it has {size} bytes, wants {end}")
    elif size > end:
        problems.append(f"{file} has {size - end} bytes beyond its last tensor")
    return problems
