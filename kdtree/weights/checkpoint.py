"""A model directory's safetensors files: names, shapes and dtypes from the headers, data on demand.

The index, where there is one, is the only authority over which file holds a tensor. Nothing but
index and safetensors files is read, and nothing is executed.
"""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from kdtree.errors import CheckpointError
from kdtree.weights.header import LIMIT, Entry, parse, read, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
    "I64": torch.int64,
}
OTHERS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # named where neither is there
UNUSED = ".rotary_emb.inv_freq"  # ends the names of tables that old checkpoints hold


class Checkpoint:
    """The tensors of a model directory.

    prefix: of all names, left out here; skipped: prefixes of tensors that are as good as not there
    entries, shapes, dtypes: by name, from the headers alone; a dtype that no model here has is its
    name
    The attribute skipped has the names, as stored, that those prefixes met.
    Raises CheckpointError, naming every offender: a file that is missing or broken, a tensor that
    is there twice, that the index places in a file that lacks it, or that the index does not know.
    """

    def __init__(self, directory: Path, prefix: str = "", skipped: tuple[str, ...] = ()):
        self.directory = Path(directory)
        self.entries: dict[str, Entry] = {}
        self.skipped: list[str] = []
        problems = []
        for stored_name, entry in self._read(problems).items():
            if stored_name.startswith(skipped) or stored_name.endswith(UNUSED):
                self.skipped.append(stored_name)
                continue
            name = stored_name.removeprefix(prefix)
            if name in self.entries:
                problems.append(f"{name} is there twice, with and without {prefix!r}")
            self.entries[name] = entry
        self.fail(problems)
        self.shapes = {name: entry.shape for name, entry in self.entries.items()}
        self.dtypes = {name: DTYPES.get(e.dtype, e.dtype) for name, e in self.entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Small tensors, on the CPU, as stored; several files at a time, each opened once."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        found = {}
        with ThreadPoolExecutor() as threads:
            for some in threads.map(self._tensors, by_file, by_file.values()):
                found |= some
        return found

    def fail(self, problems: list[str]) -> None:
        """Raises a CheckpointError that names them all, if there are any."""
        if problems:
            raise CheckpointError("\n  ".join([f"{self.directory}:", *problems]))

    def _tensors(self, file: str, names: list[str]) -> dict[str, Tensor]:
        found = {}
        try:
            with (self.directory / file).open("rb", buffering=0) as stream:
                for name in names:
                    _, _, shape, begin, nbytes = self.entries[name]
                    data = os.pread(stream.fileno(), nbytes, begin)
                    if len(data) < nbytes:
                        raise OSError(f"it ends within {name}")
                    flat = torch.frombuffer(bytearray(data or 8), dtype=self.dtypes[name])
                    found[name] = flat[: math.prod(shape)].view(shape)
        except OSError as error:
            self.fail([f"{file}: {error}"])
        return found

    def _read(self, problems: list[str]) -> dict[str, Entry]:
        """Every tensor by its stored name, where the index says that it is."""
        if not os.path.lexists(self.directory / INDEX):
            if not os.path.lexists(self.directory / SINGLE):
                others = (path.name for path in self.directory.glob("*") if path.suffix in OTHERS)
                seen = ", ".join(map(shown, sorted(others)))
                but = f", but {seen}" if seen else " nor other weights"
                self.fail([f"it holds neither {INDEX} nor {SINGLE}{but}"])
            entries, found = read(self.directory, SINGLE)
            problems += found
            return entries
        placed: dict[str, set[str]] = {}
        where = self._index()
        for name, file in where.items():
            placed.setdefault(file, set()).add(name)
        every = {}
        for file, names in sorted(placed.items()):
            entries, found = read(self.directory, file)
            problems += found
            if found:
                continue
            problems += [f"{file} lacks {shown(name)}" for name in sorted(names - entries.keys())]
            problems += [
                f"{file} holds {name}, which the index "
                + (f"places in {where[name]}" if name in where else "does not know")
                for name in sorted(entries.keys() - names)
            ]
            every |= {name: entries[name] for name in names & entries.keys()}
        return every

    def _index(self) -> dict[str, str]:
        """The file of each tensor, by its stored name."""
        path, problems = self.directory / INDEX, []
        try:
            if not path.is_file():
                raise ValueError("it is no regular file")
            size = path.stat().st_size
            if size > LIMIT:
                raise ValueError(f"it has {size} bytes, wants at most {LIMIT}")
            index = parse(
                path.read_bytes(), lambda key: problems.append(f"holds {shown(key)} twice")
            )
        except (OSError, ValueError) as error:
            self.fail([f"{INDEX} is no weight index: {error}"])
        where = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(where, dict):
            self.fail([f"{INDEX} is no weight index: it has no object weight_map"])
        plain = {file for file in where.values() if isinstance(file, str)}
        plain = set(filter(_is_plain, plain))
        for name, file in where.items():
            if not isinstance(file, str) or file not in plain:
                problems.append(f"places {shown(name)} in {file!a:.80}, wants a file beside it")
        self.fail([f"{INDEX} {problem}" for problem in problems])
        return where


def _is_plain(file: str) -> bool:
    """Whether it is the name of a file in the directory itself."""
    return file.isprintable() and file not in ("", "..") and Path(file).name == file
