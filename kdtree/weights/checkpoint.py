"""A model directory's safetensors files: names, shapes and dtypes from the headers, data on demand.

The index, where there is one, is the only authority over which file holds a tensor.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kdtree.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Checkpoint:
    """The tensors of a model directory.

    prefix: of all names, left out here; skipped: prefixes of tensors that are as good as not there
    shapes, dtypes: by name, from the headers alone; a dtype that no model here has is its name
    The attribute skipped has the names, as stored, that those prefixes met.
    Raises CheckpointError, naming every offender, on a missing or unreadable file, a tensor that
    the index places in a file that lacks it, or one that the index does not know.
    """

    def __init__(self, directory: Path, prefix: str = "", skipped: tuple[str, ...] = ()):
        self.directory = Path(directory)
        self.prefix = prefix
        self._files = {}
        self._where = self._read_index()
        problems = []
        for file in sorted(set(self._where.values())):
            self._open(file, problems)
        self._check(problems)
        if problems:
            raise CheckpointError(f"{self.directory}: " + "; ".join(problems))
        self.shapes, self.dtypes, self.skipped = {}, {}, []
        for stored_name, file in self._where.items():
            if stored_name.startswith(skipped):
                self.skipped.append(stored_name)
                continue
            stored = self._files[file].get_slice(stored_name)
            name = stored_name.removeprefix(prefix)
            self.shapes[name] = tuple(stored.get_shape())
            self.dtypes[name] = DTYPES.get(stored.get_dtype(), stored.get_dtype())

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> Tensor:
        """The tensor, on the CPU, as stored."""
        name = self.prefix + name
        return self._files[self._where[name]].get_tensor(name)

    def _read_index(self) -> dict[str, str]:
        index = self.directory / INDEX
        if index.is_file():
            try:
                where = dict(json.loads(index.read_text())["weight_map"])
                if not all(isinstance(file, str) for file in where.values()):
                    raise ValueError("weight_map holds other things than file names")
                return where
            except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{index} is not a weight index: {error!r}") from None
        if not (self.directory / SINGLE).is_file():
            raise CheckpointError(f"{self.directory} holds neither {INDEX} nor {SINGLE}")
        problems = []
        self._open(SINGLE, problems)
        if problems:
            raise CheckpointError(f"{self.directory}: " + "; ".join(problems))
        return {name: SINGLE for name in self._files[SINGLE].keys()}

    def _open(self, file: str, problems: list[str]) -> None:
        path = self.directory / file
        if file in self._files:
            return
        if not path.is_file():
            problems.append(f"{file} is missing: is the download complete?")
            return
        try:
            self._files[file] = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            problems.append(f"{file} is not a whole safetensors file: {error}")

    def _check(self, problems: list[str]) -> None:
        for file, handle in self._files.items():
            stored = set(handle.keys())
            placed = {name for name, where in self._where.items() if where == file}
            problems += [f"{file} lacks {name}" for name in sorted(placed - stored)]
            problems += [
                f"{file} holds {name}, which the index "
                + (f"places in {self._where[name]}" if name in self._where else "does not know")
                for name in sorted(stored - placed)
            ]
