"""Strict loading: a model's constructor takes its tensors by name and shape, in two passes.

The first pass runs on the meta device: it checks names, shapes and dtypes against the headers and
takes no memory. Only when nothing is missing, unused or mis-shaped does the second pass load, and
it reads ahead, since the first one knows in which order tensors are taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kdtree import ops
from kdtree.weights import formats
from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.formats import FLOATS, FP8, GROUP, Stored
from kdtree.weights.int4_check import check_int4
from kdtree.weights.passes import Checking, Loading, Pass
from kdtree.weights.reader import Progress, Reader, Reading

Model = TypeVar("Model")


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
    Raises CheckpointError. From the headers, before memory is taken: every missing, unused or
    mis-shaped tensor. From the numbers, as they are read: every tensor that holds a NaN or an
    infinity, a number too large for the model's dtype, or a scale that cannot be one; of these it
    names all that were found by the time that one of their files had been read to its end.
    """
    if quantize not in (None, "int4"):
        raise ValueError(f"quantize is {quantize!r}, wants None or 'int4'")
    checking = Checking(checkpoint)
    checkpoint.fail(_problems(checking, build, dtype, quantize))
    device, reading = torch.device(device), reading or Reading()
    with Reader(checkpoint, checking.requests, device, reading, progress) as reader:
        model = build(Weights(checkpoint, Loading(reader, device), dtype, quantize))
        reader.finish()
    return model


def check(
    checkpoint: Checkpoint,
    build: Callable[["Weights"], Model],
    *,
    dtype,
    quantize: str | None = None,
) -> list[str]:
    """Every missing, unused or mis-shaped tensor, as load would name it; takes no memory."""
    return _problems(Checking(checkpoint), build, dtype, quantize)


def _problems(
    checking: Checking, build: Callable, dtype: torch.dtype, quantize: str | None
) -> list[str]:
    build(Weights(checking.checkpoint, checking, dtype, quantize))
    return checking.finish()


@dataclass(frozen=True)
class Weights:
    """The tensors under a prefix of a checkpoint, taken by name and expected shape.

    source: of the pass, which checks or loads what is taken
    """

    checkpoint: Checkpoint
    source: Pass
    dtype: torch.dtype
    quantize: str | None
    prefix: str = ""

    @property
    def device(self) -> torch.device:
        """Of what is taken: "meta" while it is only checked."""
        return self.source.device

    def at(self, name: object) -> "Weights":
        """The tensors below a further name."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A floating-point tensor, as dtype (the model's own by default)."""
        dtype = dtype or self.dtype
        if self._dtype(name) == dtype:
            return self._keep([name], shape).view(shape)
        out = self._empty(shape, dtype)
        self.source.convert(self.prefix + name, [Stored("", shape)], dtype, out.copy_)
        return out

    def take_matrix(self, name: str, *shape: int) -> Tensor:
        """A matrix of a dense product, which may be stored as FP8, with scales in weight_scale_inv.

        bfloat16 stays so, being the same numbers in fewer bytes; else it has the model's dtype
        """
        if self._dtype(name) in (torch.bfloat16, self.dtype):
            return self._keep([name], shape).view(shape)
        return self._convert(name, self._empty(shape, self.dtype))

    def take_bank(self, names: Sequence[str], *shape: int) -> Tensor:
        """Matrices of one shape, stacked, in the model's dtype: [len(names), *shape]."""
        if {self._dtype(name) for name in names} == {self.dtype}:
            return self._keep(names, shape).view(len(names), *shape)
        bank = self._empty((len(names), *shape), self.dtype)
        for matrix, name in zip(bank, names, strict=True):
            self._convert(name, matrix)
        return bank

    def take_int4_bank(
        self, names: Sequence[str], out: int, features: int
    ) -> tuple[Tensor, Tensor]:
        """INT4 matrices [out, features], stacked and packed, and their scales.

        Each is stored as compressed-tensors does, or quantised now where `quantize` says so.
        returns [len(names), out / 32, features / 32, 128] int32 and
        [len(names), out / 32, features / 32, 32], the model's dtype
        Raises RuntimeError where the device's INT4 products are wrong.
        """
        if self.device.type != "meta":
            check_int4(self.device, self.dtype)
        tiles = (len(names), out // GROUP, features // GROUP)
        bank, scales = (
            self._empty((*tiles, 128), torch.int32),
            self._empty((*tiles, 32), self.dtype),
        )
        plain = self._empty((out, features), self.dtype)
        for name, *packed in zip(names, bank, scales, strict=True):
            if out % GROUP or features % GROUP:
                what = f"{self.prefix}{name} is {out} x {features}"
                self.source.refuse(f"{what}, INT4 wants multiples of {GROUP}")
            if self.quantize and not self.has(f"{name}.weight_packed"):
                self._convert(f"{name}.weight", plain, partial(_quantize, *packed))
            else:
                self._int4(f"{name}.weight", (out, features), *packed)
        return bank, scales

    def _dtype(self, name: str) -> torch.dtype | str | None:
        """As which it is stored."""
        return self.checkpoint.dtypes.get(self.prefix + name)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _keep(self, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """Tensors of one dtype as they are stored."""
        full = [self.prefix + name for name in names]
        return self.source.keep(full, Stored("", shape), self._dtype(names[0]))

    def _convert(
        self, name: str, out: Tensor, use: Callable[[Tensor], object] | None = None
    ) -> Tensor:
        """Fills out with a stored matrix of its shape, then calls use with it."""
        parts, decode = [Stored("", out.shape, (*FLOATS, FP8))], out.copy_
        if self._dtype(name) == FP8:
            parts, decode = formats.fp8(out.shape), partial(formats.dequantize_fp8, out=out)

        def fill(*stored: Tensor) -> None:
            decode(*stored)
            if use:
                use(out)

        self.source.convert(self.prefix + name, parts, self.dtype, fill)
        return out

    def _int4(self, name: str, shape: tuple[int, int], bank: Tensor, scales: Tensor) -> None:
        """Fills bank and scales with a matrix that is stored in INT4."""

        def fill(codes: Tensor, scale: Tensor) -> None:
            if formats.loses_codes(codes, scale):
                self.source.refuse(f"{self.prefix}{name}_scale is 0 where codes are not")
            _pack(bank, scales, codes, scale)

        self.source.convert(self.prefix + name, formats.int4(shape), self.dtype, fill)


def _quantize(bank: Tensor, scales: Tensor, w: Tensor) -> None:
    _pack(bank, scales, *formats.quantize_int4(w))


def _pack(bank: Tensor, scales: Tensor, codes: Tensor, scale: Tensor) -> None:
    packed, scale = ops.int4_pack(codes, scale.to(scales.dtype))
    bank.copy_(packed)
    scales.copy_(scale)
