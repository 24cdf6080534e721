"""Strict loading: a model's constructor takes its tensors by name and shape, in two passes.

The first pass runs on the meta device: it checks names, shapes and dtypes against the headers and
takes no memory. Only when nothing is missing, unused or mis-shaped does the second pass load.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from kdtree import ops
from kdtree.errors import CheckpointError
from kdtree.weights.checkpoint import FLOATS, Checkpoint

Model = TypeVar("Model")
GROUP = 32  # input features that share an INT4 scale


def load(checkpoint: Checkpoint, build: Callable[["Weights"], Model], *, device, dtype) -> Model:
    """Builds a model from a checkpoint.

    build: the model's constructor, called twice with a Weights to take its tensors from
    dtype: of the weights in the model, float32 or bfloat16
    Raises CheckpointError, naming every missing, unused or mis-shaped tensor.
    """
    problems = check(checkpoint, build, dtype=dtype)
    if problems:
        raise CheckpointError("\n  ".join([f"{checkpoint.directory}:", *problems]))
    return build(Weights(checkpoint, torch.device(device), dtype))


def check(checkpoint: Checkpoint, build: Callable[["Weights"], Model], *, dtype) -> list[str]:
    """Every missing, unused or mis-shaped tensor, as load would name it; takes no memory."""
    weights = Weights(checkpoint, torch.device("meta"), dtype)
    build(weights)
    unused = sorted(set(checkpoint.shapes) - weights.taken)
    return weights.problems + [f"{name} is not used by the model" for name in unused]


@dataclass(frozen=True)
class Weights:
    """The tensors under a prefix of a checkpoint, taken by name and expected shape."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    taken: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def at(self, name: object) -> "Weights":
        """The tensors below a further name."""
        prefix = f"{self.prefix}{name}."
        return Weights(self.checkpoint, self.device, self.dtype, prefix, self.taken, self.problems)

    def has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A floating-point tensor, as dtype (the model's own by default)."""
        stored = self._stored(name, shape, FLOATS)
        return stored.to(self.device, dtype or self.dtype)

    def take_matrix(self, name: str, *shape: int) -> Tensor:
        """A matrix of a dense product; bfloat16 stays so, being the same numbers in fewer bytes."""
        stored = self._stored(name, shape, FLOATS)
        keep = stored.dtype == torch.bfloat16
        return stored.to(self.device, stored.dtype if keep else self.dtype)

    def take_int4(self, name: str, out: int, features: int) -> tuple[Tensor, Tensor]:
        """A compressed-tensors INT4 matrix [out, features], packed, and its scales.

        returns [out / 32, features / 32, 128] int32 and [out / 32, features / 32, 32]
        """
        codes = self._stored(f"{name}.weight_packed", (out, features // 8), (torch.int32,))
        scale = self._stored(f"{name}.weight_scale", (out, features // GROUP), FLOATS)
        self._check_shape(f"{name}.weight_shape", [out, features])
        if out % GROUP or features % GROUP:
            self.problems.append(
                f"{self.prefix}{name} is {out} x {features}, INT4 wants multiples of {GROUP}"
            )
        if self.device.type == "meta":
            tiles = (out // GROUP, features // GROUP)
            return codes.new_empty((*tiles, 128)), scale.new_empty((*tiles, 32))
        return ops.int4_pack(codes.to(self.device), scale.to(self.device, self.dtype))

    def _check_shape(self, name: str, wants: list[int]) -> None:
        """The shape that compressed-tensors stores beside the codes is the one we expect."""
        stored = self._stored(name, (2,), (torch.int32, torch.int64))
        if self.device.type == "meta" and self.has(name) and stored.shape == (2,):
            found = self.checkpoint.tensor(self.prefix + name).tolist()
            if found != wants:
                self.problems.append(f"{self.prefix}{name} is {found}, wants {wants}")

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple) -> Tensor:
        name = self.prefix + name
        self.taken.add(name)
        if self.device.type != "meta":
            return self.checkpoint.tensor(name)
        if name not in self.checkpoint:
            self.problems.append(f"{name} is missing")
        else:
            found, dtype = self.checkpoint.shapes[name], self.checkpoint.dtypes[name]
            if found != shape:
                self.problems.append(f"{name} has shape {list(found)}, wants {list(shape)}")
            if dtype not in dtypes:
                wants = ", ".join(map(_plain, dtypes))
                self.problems.append(f"{name} has dtype {_plain(dtype)}, wants {wants}")
        return torch.empty(shape, device="meta", dtype=dtypes[0])


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
