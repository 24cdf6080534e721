"""Costs from one engine to the next: a JSON file each in the user's cache directory.

A file holds all that its costs depend on, and is named by a hash of that. What cannot be read or
does not fit is as good as absent; what cannot be written is left.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kdtree.card import card, mma_sync
from kdtree.costs import Costs
from kdtree.files import read_object

Key = dict[str, str | int | bool]


def key(device: torch.device, weights: Iterable[tuple[str, Tensor]], **rest: str | int) -> Key:
    """What costs depend on. weights: by name, of which kind and shape count; rest: all else

    Not in it: the weights' values, by which siblings share more experts or fewer; a GPU's power
    limit and driver; the host's CPU where it launches op by op.
    """
    kinds = sorted(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in weights)
    hardware = {"card": card(device), "mma_sync": mma_sync()}
    software = {"package": _package(), "torch": str(torch.__version__)}
    return {**hardware, **software, "weights": _hash("\n".join(kinds).encode()), **rest}


def directory() -> Path | None:
    """$XDG_CACHE_HOME/kdtree, or ~/.cache/kdtree; None where there is no home either."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"))
    return base / "kdtree" if base.is_absolute() else None


def read(key: Key, sizes: list[int]) -> Costs | None:
    """The costs of this key, of rounds of these sizes; None where no file has them."""
    try:
        found = read_object(_path(key), ValueError)
        rounds = {int(size): seconds for size, seconds in found["rounds"].items()}
        if found["key"] != key or sorted(rounds) != sorted(sizes):
            return None
        return Costs(rounds, found["draft"])
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def write(key: Key, costs: Costs) -> None:
    """Whole or not at all, whoever else writes or reads it."""
    value = {"key": key, "rounds": dict(costs.rounds), "draft": costs.draft}
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            written = Path(own) / path.name
            written.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
            os.replace(written, path)
    except (OSError, ValueError):
        return


def _path(key: Key) -> Path:
    """Raises ValueError where there is no directory."""
    if (parent := directory()) is None:
        raise ValueError("there is neither XDG_CACHE_HOME nor a home, wants one of them")
    return parent / f"costs-{_hash(json.dumps(key, sort_keys=True).encode())}.json"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@cache
def _package() -> str:
    """Of its code, in Python and built."""
    root = Path(__file__).parent
    files = sorted([*root.rglob("*.py"), *root.glob("*.so")])
    return _hash(b"".join(file.read_bytes() for file in files))
