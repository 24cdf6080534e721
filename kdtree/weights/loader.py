"""Strict loading: a model's constructor takes its tensors by name and shape, in two passes.

The first pass runs on the meta device: it checks names, shapes and dtypes against the headers and
takes no memory. Only when nothing is missing, unused or mis-shaped does the second pass load, and
it reads ahead, since the first one knows in which order tensors are taken.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from kdtree import ops
from kdtree.weights.checkpoint import FLOATS, Checkpoint
from kdtree.weights.formats import GROUP, dequantise_fp8, fp8_scale_shape, quantise_int4
from kdtree.weights.memory import Request
from kdtree.weights.reader import Progress, Reader, Reading

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
    Beside the model's own, host memory holds at most 2 * reading.ring bytes, never more than the
    two largest files have, and what the conversion of one matrix takes.
    Raises CheckpointError, naming every missing, unused or mis-shaped tensor before it takes
    memory; and, once all is read, every tensor that holds a NaN or an infinity.
    """
    if quantize not in (None, "int4"):
        raise ValueError(f"quantize is {quantize!r}, wants None or 'int4'")
    plan = _Plan(checkpoint)
    checkpoint.fail(plan.problems(build, dtype, quantize))
    device, reading = torch.device(device), reading or Reading()
    with Reader(checkpoint, plan.requests, device, reading, progress) as reader:
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
    requests: list[Request] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)  # what weight_shapes must hold

    def problems(self, build: Callable, dtype: torch.dtype, quantize: str | None) -> list[str]:
        build(Weights(self.checkpoint, META, dtype, quantize, self))
        unused = sorted(set(self.checkpoint.shapes) - self.taken)
        self.wrong += [f"{name} is not used by the model" for name in unused]
        names = [name for name in self.shapes if self.checkpoint.shapes.get(name) == (2,)]
        for name, found in self.checkpoint.tensors(names).items():
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
        dtype = dtype or self.dtype
        if self._dtype(name) == dtype:
            return self._stored([name], shape, FLOATS).view(shape)
        out = self._empty(shape, dtype)
        with self._borrowed(name, shape, FLOATS) as stored:
            return out.copy_(stored)

    def take_matrix(self, name: str, *shape: int) -> Tensor:
        """A matrix of a dense product, which may be stored as FP8, with scales in weight_scale_inv.

        bfloat16 stays so, being the same numbers in fewer bytes; else it has the model's dtype
        """
        if self._dtype(name) in (torch.bfloat16, self.dtype):
            return self._stored([name], shape, FLOATS).view(shape)
        return self._convert(self._empty(shape, self.dtype), name)

    def take_bank(self, names: Sequence[str], *shape: int) -> Tensor:
        """Matrices of one shape, stacked, in the model's dtype: [len(names), *shape]."""
        if {self._dtype(name) for name in names} == {self.dtype}:
            return self._stored(names, shape, FLOATS).view(len(names), *shape)
        bank = self._empty((len(names), *shape), self.dtype)
        for matrix, name in zip(bank, names, strict=True):
            self._convert(matrix, name)
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
        bank, scales = (
            self._empty((*tiles, 128), torch.int32),
            self._empty((*tiles, 32), self.dtype),
        )
        plain = self._empty((out, features), self.dtype)
        for i, name in enumerate(names):
            if self.quantize and not self.has(f"{name}.weight_packed"):
                self._convert(plain, f"{name}.weight")
                if not self._planning:
                    self._pack(bank[i], scales[i], *quantise_int4(plain))
            else:
                self._int4(bank[i], scales[i], name, out, features)
            if self._planning and (out % GROUP or features % GROUP):
                what = f"{self.prefix}{name} is {out} x {features}"
                self.source.wrong.append(f"{what}, INT4 wants multiples of {GROUP}")
        return bank, scales

    @property
    def _planning(self) -> bool:
        return self.device.type == "meta"

    def _dtype(self, name: str) -> torch.dtype | str | None:
        """As which it is stored."""
        return self.checkpoint.dtypes.get(self.prefix + name)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _convert(self, out: Tensor, name: str) -> Tensor:
        """Fills out with a stored matrix of its shape; FP8 has scales beside it."""
        if self._dtype(name) != FP8:
            with self._borrowed(name, out.shape, (*FLOATS, FP8)) as stored:
                return out.copy_(stored)
        scale = f"{name}_scale_inv", fp8_scale_shape(out.shape), (torch.float32,)
        with self._borrowed(name, out.shape, (FP8,)) as stored, self._borrowed(*scale) as scale:
            return out if self._planning else dequantise_fp8(stored, scale, out)

    def _int4(self, bank: Tensor, scales: Tensor, name: str, out: int, features: int) -> None:
        """Fills bank and scales with a matrix that is stored in INT4."""
        codes = f"{name}.weight_packed", (out, features // 8), (torch.int32,)
        scale = f"{name}.weight_scale", (out, features // GROUP), FLOATS
        with self._borrowed(*codes) as codes, self._borrowed(*scale) as scale:
            if not self._planning:
                self._pack(bank, scales, codes, scale)
                return
        shape = f"{self.prefix}{name}.weight_shape"
        self.source.expect(shape, (2,), (torch.int32, torch.int64))
        self.source.shapes[shape] = [out, features]

    def _pack(self, bank: Tensor, scales: Tensor, codes: Tensor, scale: Tensor) -> None:
        packed, scale = ops.int4_pack(codes, scale.to(self.dtype))
        bank.copy_(packed)
        scales.copy_(scale)

    @contextmanager
    def _borrowed(self, name: str, shape: tuple[int, ...], dtypes: tuple) -> Iterator[Tensor]:
        """A tensor as stored, on the device, whose memory is used again after."""
        stored = self._stored([name], shape, dtypes, borrowed=True)
        yield stored.view(shape)
        if not self._planning:
            self.source.give_back(stored.view(torch.uint8))

    def _stored(
        self, names: Sequence[str], shape: tuple[int, ...], dtypes: tuple, borrowed: bool = False
    ) -> Tensor:
        """Tensors of one shape and dtype, as stored, their elements one after the other: 1-D."""
        request = Request(tuple(self.prefix + name for name in names), borrowed)
        if not self._planning:
            return self.source.take(request).view(self._dtype(names[0]))
        for name in request.names:
            self.source.expect(name, shape, dtypes)
        self.source.requests.append(request)
        dtype = self._dtype(names[0])
        return self._empty(
            (len(names) * math.prod(shape),), dtype if dtype in dtypes else dtypes[0]
        )


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
