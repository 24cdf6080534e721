"""Strict loading: a model's constructor takes its tensors by name and shape, in two passes.

The first pass runs on the meta device: it checks names, shapes and dtypes against the headers and
takes no memory. Only when nothing is missing, unused or mis-shaped does the second pass load, and
it reads ahead, since the first one knows in which order tensors are taken.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from kdtree import ops
from kdtree.weights.checkpoint import FLOATS, Checkpoint
from kdtree.weights.formats import GROUP, dequantise_fp8, fp8_scale_shape, quantise_int4
from kdtree.weights.reader import Names, Progress, Reader, Reading

Model = TypeVar("Model")
FP8 = torch.float8_e4m3fn
META = torch.device("meta")


def load(
    checkpoint: Checkpoint,
    build: Callable[["Weights"], Model],
    *,
    device,
    dtype,
    quantize: str | None = None,
    progress: Progress | None = None,
    reading: Reading | None = None,
) -> Model:
    """Builds a model from a checkpoint.

    build: the model's constructor, called twice with a Weights to take its tensors from
    dtype: of the weights in the model, float32 or bfloat16
    quantize: "int4" for routed experts that are stored otherwise
    progress: called with the bytes loaded so far and the bytes in all, as they grow
    Beside the model's own, host memory holds at most reading.ring bytes and, on a CPU, the stored
    tensor that is being converted.
    Raises CheckpointError, naming every missing, unused or mis-shaped tensor before it takes
    memory; and, once all is read, every tensor that holds a NaN or an infinity.
    """
    plan = _Plan(checkpoint)
    checkpoint.fail(plan.problems(build, dtype, quantize))
    device, reading = torch.device(device), reading or Reading()
    with Reader(checkpoint, plan.items, device, reading, progress) as reader:
        model = build(Weights(checkpoint, device, dtype, quantize, reader))
    checkpoint.fail([f"{name} is not finite" for name in sorted(reader.non_finite)])
    return model


def check(
    checkpoint: Checkpoint,
    build: Callable[["Weights"], Model],
    *,
    dtype,
    quantize: str | None = None,
) -> list[str]:
    """Every missing, unused or mis-shaped tensor, as load would name it; takes no memory."""
    return _Plan(checkpoint).problems(build, dtype, quantize)


@dataclass
class _Plan:
    """What the first pass finds: tensors in the order of their taking, and what is wrong."""

    checkpoint: Checkpoint
    items: list[Names] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)  # what weight_shapes must hold

    def problems(self, build: Callable, dtype: torch.dtype, quantize: str | None) -> list[str]:
        build(Weights(self.checkpoint, META, dtype, quantize, self))
        unused = sorted(set(self.checkpoint.shapes) - self.taken)
        self.wrong += [f"{name} is not used by the model" for name in unused]
        names = [name for name in self.shapes if self.checkpoint.shapes.get(name) == (2,)]
        with ThreadPoolExecutor() as threads:  # many tiny reads
            for name, found in zip(names, threads.map(self.checkpoint.tensor, names), strict=True):
                if found.tolist() != self.shapes[name]:
                    self.wrong.append(f"{name} is {found.tolist()}, wants {self.shapes[name]}")
        return self.wrong

    def expect(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """A stored tensor must be there and as wanted."""
        self.taken.add(name)
        if name not in self.checkpoint:
            self.wrong.append(f"{name} is missing")
            return
        found, dtype = self.checkpoint.shapes[name], self.checkpoint.dtypes[name]
        if found != shape:
            self.wrong.append(f"{name} has shape {list(found)}, wants {list(shape)}")
        if dtype not in dtypes:
            wants = ", ".join(map(_plain, dtypes))
            self.wrong.append(f"{name} has dtype {_plain(dtype)}, wants {wants}")

    def take(self, names: Names) -> None:
        self.items.append(names)


@dataclass(frozen=True)
class Weights:
    """The tensors under a prefix of a checkpoint, taken by name and expected shape.

    source: a plan to be made, where the device is meta, or a reader that follows it
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    quantize: str | None
    source: _Plan | Reader
    prefix: str = ""

    def at(self, name: object) -> "Weights":
        """The tensors below a further name."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A floating-point tensor, as dtype (the model's own by default)."""
        return self._stored(name, shape, FLOATS).to(dtype or self.dtype)

    def take_matrix(self, name: str, *shape: int) -> Tensor:
        """A matrix of a dense product, which may be stored as FP8, with scales in weight_scale_inv.

        bfloat16 stays so, being the same numbers in fewer bytes; else it has the model's dtype
        """
        matrix = self._matrix(name, shape)
        return matrix if matrix.dtype == torch.bfloat16 else matrix.to(self.dtype)

    def take_bank(self, names: Sequence[str], *shape: int) -> Tensor:
        """Matrices of one shape, stacked, in the model's dtype: [len(names), *shape]."""
        stored = {self.checkpoint.dtypes.get(self.prefix + name) for name in names}
        if stored == {self.dtype}:  # as they are, side by side
            return self._side_by_side(names, shape, (self.dtype,)).view(len(names), *shape)
        bank = torch.empty(len(names), *shape, dtype=self.dtype, device=self.device)
        for matrix, name in zip(bank, names, strict=True):
            matrix.copy_(self._matrix(name, shape))
        return bank

    def take_int4_bank(
        self, names: Sequence[str], out: int, features: int
    ) -> tuple[Tensor, Tensor]:
        """INT4 matrices [out, features], stacked and packed, and their scales.

        Each is stored as compressed-tensors does, or quantised now where `quantize` says so.
        returns [len(names), out / 32, features / 32, 128] int32 and
        [len(names), out / 32, features / 32, 32], the model's dtype
        """
        tiles = (len(names), out // GROUP, features // GROUP)
        bank = torch.empty(*tiles, 128, dtype=torch.int32, device=self.device)
        scales = torch.empty(*tiles, 32, dtype=self.dtype, device=self.device)
        for i, name in enumerate(names):
            if self.quantize and not self.has(f"{name}.weight_packed"):
                matrix = self._matrix(f"{name}.weight", (out, features)).to(self.dtype)
                codes, scale = (None, None) if self._planning else quantise_int4(matrix)
            else:
                codes, scale = self._int4(name, out, features)
            if not self._planning:
                bank[i], scales[i] = ops.int4_pack(codes, scale.to(self.dtype))
            elif out % GROUP or features % GROUP:
                what = f"{self.prefix}{name} is {out} x {features}"
                self.source.wrong.append(f"{what}, INT4 wants multiples of {GROUP}")
        return bank, scales

    @property
    def _planning(self) -> bool:
        return self.device.type == "meta"

    def _int4(self, name: str, out: int, features: int) -> tuple[Tensor, Tensor]:
        """Codes and scales as stored."""
        codes = self._stored(f"{name}.weight_packed", (out, features // 8), (torch.int32,))
        scale = self._stored(f"{name}.weight_scale", (out, features // GROUP), FLOATS)
        if self._planning:
            shape = f"{self.prefix}{name}.weight_shape"
            self.source.expect(shape, (2,), (torch.int32, torch.int64))
            self.source.shapes[shape] = [out, features]
        return codes, scale

    def _matrix(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As stored, or in the model's dtype where that is FP8."""
        if self.checkpoint.dtypes.get(self.prefix + name) != FP8:
            return self._stored(name, shape, (*FLOATS, FP8))
        matrix = self._stored(name, shape, (FP8,))
        scale = self._stored(f"{name}_scale_inv", fp8_scale_shape(shape), (torch.float32,))
        if self._planning:
            return matrix.to(self.dtype)
        return dequantise_fp8(matrix, scale, self.dtype)

    def _stored(self, name: str, shape: tuple[int, ...], dtypes: tuple) -> Tensor:
        """A tensor as stored, on the device."""
        return self._side_by_side((name,), shape, dtypes).view(shape)

    def _side_by_side(
        self, names: Sequence[str], shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor:
        """Tensors of one shape and dtype, as stored, their elements one after the other."""
        names = tuple(self.prefix + name for name in names)
        if self._planning:
            for name in names:
                self.source.expect(name, shape, dtypes)
            self.source.take(names)
            dtype = self.checkpoint.dtypes.get(names[0])
            dtype = dtype if dtype in dtypes else dtypes[0]
            return torch.empty(len(names) * math.prod(shape), dtype=dtype, device=self.device)
        return self.source.take(names).view(self.checkpoint.dtypes[names[0]])


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
