"""A round's outcome on its way to the host: one copy, read sequence by sequence."""

import struct
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from kdtree.outputs import RoundTrace
from kdtree.phases import seconds
from kdtree.request import Emitted, Request
from kdtree.tree import Path, TokenTree


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks of its rounds.

    masking: some sequence masks tokens (min_tokens); best: log-probabilities after each node
    traced: the trees themselves
    """

    masking: bool = False
    best: int = 0
    traced: bool = False

    @staticmethod
    def by(requests: list[Request]) -> "Asked":
        return Asked(
            masking=any(r.params.min_tokens for r in requests),
            best=max((r.params.logprobs or 0 for r in requests), default=0),
            traced=any(r.completion.trace is not None for r in requests),
        )


@dataclass(frozen=True, slots=True)
class Landed:
    """A round as the host hears of it.

    emitted: by sequence; phases: seconds; nodes: N of its tree
    told: [B][X], what the drafter's commit returned, side by side and floats as their bits
    """

    emitted: list[Emitted]
    phases: dict[str, float]
    nodes: int
    told: list[list[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round left on the device for the host.

    packed: [B, sum of widths] int64, side by side: State.commit's record, which begins with the
    depth offered and accepted; where they are asked, the best log-probabilities' bits and ids after
    each node of the path, and the tree: tokens, parents, scores' bits, the path's nodes; the times
    of Phases; what the drafter wants to be told
    """

    packed: Tensor
    widths: tuple[int, ...]
    best: int
    nodes: int

    @staticmethod
    def of(
        tree: TokenTree,
        path: Path,
        record: Tensor,
        best: tuple[Tensor, Tensor] | None,
        traced: bool,
        times: Tensor,
        told: tuple[Tensor, ...] | None,
    ) -> "Round":
        """record: from State.commit, with depths; best: from Path.best; times: of Phases;
        told: from the drafter's commit"""
        B, J = path.token.shape
        k = best[0].shape[2] if best else 0
        parts = [record]
        if best:
            parts += [_bits(best[0]).view(B, -1), best[1].view(B, -1)]
        if traced:
            parts += [tree.token, tree.parent, _bits(tree.score), path.node]
        parts.append(times.expand(B, -1))
        if told:
            parts.append(torch.cat([x.view(torch.int32) for x in told], 1))
        nodes = tree.token.shape[1]
        N, last = (nodes, J) if traced else (0, 0)
        asked = J * k, J * k, N, N, N, last, len(times), sum(x.shape[1] for x in told or ())
        packed = torch.cat([part.long() for part in parts], 1)
        return Round(packed, (1, 1, 1, 1, J, J, *asked), k, nodes)

    def read(self, host: Tensor) -> Landed:
        """host: a copy of `packed`"""
        rows = [self._parts(row) for row in host.tolist()]
        times, told = rows[0][-2], [parts[-1] for parts in rows]
        return Landed([self._emitted(*parts) for parts in rows], seconds(times), self.nodes, told)

    def _parts(self, row: list[int]) -> list[list[int]]:
        values = iter(row)
        return [list(islice(values, width)) for width in self.widths]

    def _emitted(self, *parts: list[int]) -> Emitted:
        (offered,), (accepted,), (kept,), (reason,), tokens, logprobs, *asked = parts
        best_logprobs, best_ids, token, parent, score, node, *_ = asked
        tokens, best, trace = tokens[:kept], None, None
        if self.best:
            each = list(zip(best_ids, floats(best_logprobs), strict=True))
            best = [each[i * self.best : (i + 1) * self.best] for i in range(kept)]
        if token:
            trace = RoundTrace(token, parent, floats(score), node[:kept], list(tokens))
        return Emitted(tokens, floats(logprobs[:kept]), reason, offered, accepted, best, trace)


class Packed(Protocol):
    """A round, or one that is still to be chosen. packed: int64, what it leaves for the host"""

    packed: Tensor

    def read(self, host: Tensor) -> Landed:
        """host: a copy of `packed`"""


class Sent:
    """A round whose record is on its way. arrived: the event after the copy to `host`"""

    def __init__(self, round: Packed, host: Tensor, arrived: torch.cuda.Event | None):
        self._round, self._host, self._arrived = round, host, arrived

    def read(self) -> Landed:
        """Here the host waits for the device."""
        if self._arrived:
            self._arrived.synchronize()
        return self._round.read(self._host)


class Records:
    """Brings rounds' records to the host through a ring of pinned buffers, while it goes on.

    A record must be read before the ring comes round to it: SLOTS rounds later.
    """

    SLOTS = 2

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._slots = [(torch.empty(0, dtype=torch.int64), None)] * self.SLOTS
        self._next = 0

    def send(self, round: Packed) -> Sent:
        packed = round.packed
        if not self._cuda:
            return Sent(round, packed, None)
        buffer, arrived = self._slots[self._next]
        if buffer.numel() < packed.numel():
            buffer = torch.empty(packed.numel(), dtype=torch.int64, pin_memory=True)
            arrived = torch.cuda.Event()
            self._slots[self._next] = buffer, arrived
        self._next = (self._next + 1) % self.SLOTS
        host = buffer[: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        arrived.record(torch.cuda.current_stream(packed.device))
        return Sent(round, host, arrived)


def to_host(x: Tensor) -> Tensor:
    """A copy on the CPU, through pinned memory from CUDA."""
    if x.device.type != "cuda":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return host


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def floats(bits: list[int]) -> list[float]:
    """Of float32 that came as integers."""
    return list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))
