"""The two passes over a model's tensors: what is asked for is first checked, then read."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.formats import Stored
from kdtree.weights.memory import Request
from kdtree.weights.numbers import Rule
from kdtree.weights.reader import Reader


class Pass(Protocol):
    """Answers what a model's constructor asks for, tensor by tensor, by their full names."""

    device: torch.device

    def keep(self, names: Sequence[str], stored: Stored, dtype: torch.dtype) -> Tensor:
        """Tensors of one shape, stored in this dtype, their elements one after the other: 1-D."""

    def convert(
        self, name: str, parts: Sequence[Stored], dtype: torch.dtype, use: Callable[..., object]
    ) -> None:
        """Calls use with the tensors that a matrix is stored as; they are its own until it returns.

        name: of the matrix; dtype: of what is made of them
        """

    def refuse(self, problem: str) -> None:
        """The checkpoint is no good."""


@dataclass
class Checking:
    """Finds the tensors in the order of their taking, and what is wrong, from headers alone.

    problems: all that is wrong with what was asked for; requests: what the second pass will read
    """

    checkpoint: Checkpoint
    device: torch.device = torch.device("meta")
    problems: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    contents: dict[str, list[int]] = field(default_factory=dict)  # what small tensors must hold

    def keep(self, names: Sequence[str], stored: Stored, dtype: torch.dtype) -> Tensor:
        for name in names:
            self._expect(name, stored)
        self.requests.append(Request(tuple(names)))
        return torch.empty(len(names) * math.prod(stored.shape), dtype=dtype, device=self.device)

    def convert(
        self, name: str, parts: Sequence[Stored], dtype: torch.dtype, use: Callable[..., object]
    ) -> None:
        for part in parts:
            self._expect(name + part.suffix, part)
            if part.content is not None:
                self.contents[name + part.suffix] = part.content
        self.requests += _requests(name, parts, dtype)

    def refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def finish(self) -> list[str]:
        """The problems, those included that show only when all was asked for."""
        unused = sorted(set(self.checkpoint.shapes) - self.asked)
        self.problems += [f"{name} is not used by the model" for name in unused]
        names = [name for name in self.contents if self._is_shape(name)]
        for name, found in self.checkpoint.tensors(names).items():
            if found.tolist() != self.contents[name]:
                self.problems.append(f"{name} is {found.tolist()}, wants {self.contents[name]}")
        return self.problems

    def _is_shape(self, name: str) -> bool:
        """Whether a tensor that says a shape can be read; where it cannot, that was told."""
        integers = (torch.int32, torch.int64)
        c = self.checkpoint
        return c.shapes.get(name) == (2,) and c.dtypes[name] in integers

    def _expect(self, name: str, wanted: Stored) -> None:
        self.asked.add(name)
        if name not in self.checkpoint:
            self.problems.append(f"{name} is missing")
            return
        found, dtype = self.checkpoint.shapes[name], self.checkpoint.dtypes[name]
        if found != tuple(wanted.shape):
            self.problems.append(f"{name} has shape {list(found)}, wants {list(wanted.shape)}")
        if dtype not in wanted.dtypes:
            wants = ", ".join(map(_plain, wanted.dtypes))
            self.problems.append(f"{name} has dtype {_plain(dtype)}, wants {wants}")


@dataclass(frozen=True)
class Loading:
    """Reads what is asked for. device: where the tensors are wanted"""

    reader: Reader
    device: torch.device

    def keep(self, names: Sequence[str], stored: Stored, dtype: torch.dtype) -> Tensor:
        return self.reader.take(Request(tuple(names))).view(dtype)

    def convert(
        self, name: str, parts: Sequence[Stored], dtype: torch.dtype, use: Callable[..., object]
    ) -> None:
        taken = [self.reader.take(request) for request in _requests(name, parts, dtype)]
        dtypes = self.reader.checkpoint.dtypes
        use(
            *(
                memory.view(dtypes[name + part.suffix]).view(part.shape)
                for memory, part in zip(taken, _read(parts), strict=True)
            )
        )
        for memory in taken:
            self.reader.give_back(memory)

    def refuse(self, problem: str) -> None:
        self.reader.problems.append(problem)


def _read(parts: Sequence[Stored]) -> list[Stored]:
    """Those whose numbers are not known beforehand."""
    return [part for part in parts if part.content is None]


def _requests(name: str, parts: Sequence[Stored], dtype: torch.dtype) -> list[Request]:
    most = torch.finfo(dtype).max
    return [
        Request((name + p.suffix,), True, Rule(most / p.factor, p.positive)) for p in _read(parts)
    ]


def _plain(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
