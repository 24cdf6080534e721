"""Where a plan's tensors come from: a model directory's headers, or a config.json alone."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kdtree.config import ModelConfig, from_hf, load, read_json
from kdtree.errors import ConfigError
from kdtree.plan.tensors import PARTS, Tensors, expected, storage, stored
from kdtree.weights import Checkpoint
from kdtree.weights.checkpoint import INDEX, SINGLE


@dataclass(frozen=True, slots=True)
class Source:
    """A model as far as its metadata tell.

    headers: whether tensors are what safetensors headers name, else what the config implies
    disagreements: parts of which headers hold another number of parameters than the config implies
    """

    config: ModelConfig
    tensors: tuple[Tensors, ...]
    headers: bool
    disagreements: tuple[str, ...]


def read(path: Path) -> Source:
    """Reads a model directory, or a config.json; no weights.

    Raises ConfigError, or CheckpointError where a file of the directory is missing or broken.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist, wants a model directory or a config.json")
    if not path.is_dir():
        raw = read_json(path)
        config = from_hf(raw)
        return Source(config, tuple(expected(config, storage(raw))), False, ())
    config = load(path)
    implied = tuple(expected(config, storage(read_json(path / "config.json"))))
    if not any(os.path.lexists(path / name) for name in (INDEX, SINGLE)):
        return Source(config, implied, False, ())
    tensors = tuple(stored(Checkpoint(path, config.prefix), config))
    return Source(config, tensors, True, _disagreements(tensors, implied))


def _disagreements(found: Iterable[Tensors], implied: Iterable[Tensors]) -> tuple[str, ...]:
    has, wants = _parameters(found), _parameters(implied)
    return tuple(
        f"{part}: the headers hold {has[part]:,} parameters, the config implies {wants[part]:,}"
        for part in PARTS
        if has[part] != wants[part]
    )


def _parameters(tensors: Iterable[Tensors]) -> dict[str, int]:
    totals = dict.fromkeys(PARTS, 0)
    for each in tensors:
        if each.part in totals:
            totals[each.part] += each.parameters
    return totals
