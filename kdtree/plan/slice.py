"""Steps of a whole model by a slice of it that one GPU ran: a file of `kdtree bench --shape`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdtree.config import ModelConfig
from kdtree.errors import ConfigError
from kdtree.files import read_object
from kdtree.plan.estimate import Plan, StepTime
from kdtree.plan.tensors import ROUTED

DENSE, EXPERTS, HEAD, REST = "dense layer", "MoE layer", "head", "rest"  # parts of a slice
ASSUMED = (
    "by a slice: every layer takes what those of its kind took there, on average; divided among "
    "GPUs each stays as many times its floor as it was (ratio) or as long above it (excess), for "
    "work gets shorter where it is divided, launches and waits do not"
)


@dataclass(frozen=True, slots=True)
class Projected:
    """ms of a step of N nodes, all-reduces included.

    ratio, excess: with each part as many times its floor, or as long above it, as in the slice
    """

    nodes: int
    ratio: float
    excess: float


def identity(config: ModelConfig) -> dict[str, Any]:
    """What a slice must have in common with a model to say something of it."""
    moe = config.moe and {**asdict(config.moe), "first_layer": None}
    same = "vocab", "hidden", "dense_width"
    return {name: getattr(config, name) for name in same} | {
        "mla": asdict(config.mla),
        "moe": moe,
    }


def read_slice(path: Path) -> dict[str, Any]:
    """Raises ConfigError where the file is none of `kdtree bench --shape`."""
    found = read_object(path, ConfigError)
    if not {"shape", "identity", "context", "weights", "rows"} <= found.keys():
        raise ConfigError(f"{path} holds no results of kdtree bench --shape")
    return found


def project(config: ModelConfig, made: Plan, slice_: dict[str, Any]) -> list[Projected]:
    """The steps of a plan whose nodes the slice has too, of which there must be some.

    Raises ValueError where the slice is of another model, context or format of experts.
    """
    held = "int4" if slice_["weights"] == "random-int4" else "bfloat16"
    experts = [part.held_as for part in made.parts if part.part == ROUTED]
    for name, ours, its in (
        ("dimensions", identity(config), slice_["identity"]),
        ("cached latents", "fp8" if made.fp8 else "bfloat16", "bfloat16"),
        ("tokens of context", made.context, slice_["context"]),
        ("routed experts", experts, [held] if experts else []),
    ):
        if ours != its:
            both = f": {its} instead of {ours}" if name != "dimensions" else ""
            raise ValueError(
                f"{name} of the slice, of {slice_['shape']}: not those of the plan{both}"
            )
    rows = {row["nodes"]: {part["name"]: part for part in row["parts"]} for row in slice_["rows"]}
    steps = [step for step in made.steps if step.nodes in rows]
    if not steps:
        asked = ", ".join(str(step.nodes) for step in made.steps)
        raise ValueError(f"the slice has {', '.join(map(str, rows))} nodes, the plan {asked}")
    return [_projected(config, step, rows[step.nodes]) for step in steps]


def _projected(config: ModelConfig, step: StepTime, parts: dict[str, dict]) -> Projected:
    floors = _floors(config, step)
    counts = {kind: count for kind, (count, _) in floors.items()}
    if missing := [kind for kind, count in counts.items() if count and kind not in parts]:
        raise ValueError(f"the slice has no {missing[0]}, the model has {counts[missing[0]]}")
    ratio = excess = step.all_reduce + parts[REST]["us"] / 1e3
    for kind, (count, ms) in floors.items():
        if count:
            us, floor_us = parts[kind]["us"], parts[kind]["floor_us"]
            ratio += ms * us / floor_us
            excess += ms + count * (us - floor_us) / 1e3
    return Projected(step.nodes, ratio, excess)


def _floors(config: ModelConfig, step: StepTime) -> dict[str, tuple[int, float]]:
    """How many parts of a kind the model has, and the ms that all of them take at the least."""
    moe = sum(map(config.is_moe, range(config.layers)))
    every = sum(step.weights.get(part, 0.0) for part in ("attention", "norms")) + step.context
    own = {"dense MLP": DENSE, "head": HEAD, "embedding": HEAD}  # of tied weights the head reads it
    ms = {DENSE: every * (1 - moe / config.layers), EXPERTS: every * moe / config.layers, HEAD: 0.0}
    for part, each in step.weights.items():
        if part not in ("attention", "norms"):
            ms[own.get(part, EXPERTS)] += each
    return {
        DENSE: (config.layers - moe, ms[DENSE]),
        EXPERTS: (moe, ms[EXPERTS]),
        HEAD: (1, ms[HEAD]),
    }
