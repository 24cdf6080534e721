"""The drafter's keys and values of committed tokens, one ring of rows a layer and sequence."""

import torch
from torch import Tensor

from kdtree.cache import require_room
from kdtree.drafters.dflash.config import Architecture
from kdtree.tree import MAX_DEPTH


class ContextCache:
    """Keys and values of B sequences of up to max_seq_len tokens, normed and rotated.

    length: [B] int32, tokens committed; position p of layer l is row p % S of k[l] and v[l]
    k, v: per layer [B, S, kv_heads, head]; windows: per layer, 0 where S holds every position
    Reserved: 2 * B * S * kv_heads * head elements a layer and one row more, S = max_seq_len + 16
    where the layer sees all, or its window where that is less.
    Raises CapacityError where the device has not the memory.
    """

    def __init__(
        self,
        c: Architecture,
        sequences: int,
        max_seq_len: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ):
        most = max_seq_len + MAX_DEPTH + 1  # a last round may commit beyond the end
        self.windows = [a.window if 0 < a.window <= most else 0 for a in c.attention]
        self.rows = [window or most for window in self.windows]
        row = (c.kv_heads, c.head)
        asked = 2 * sum(sequences * S + 1 for S in self.rows) * c.kv_heads * c.head
        what = f"the drafter's cache of {sequences} x {max_seq_len} tokens"
        require_room(what, asked * dtype.itemsize, device)

        def rows(S: int) -> Tensor:  # the last takes what is not kept
            return torch.zeros(sequences * S + 1, *row, device=device, dtype=dtype)

        self._k, self._v = [rows(S) for S in self.rows], [rows(S) for S in self.rows]
        each = range(len(self.rows))
        self.k = [self._k[i][:-1].view(sequences, self.rows[i], *row) for i in each]
        self.v = [self._v[i][:-1].view(sequences, self.rows[i], *row) for i in each]
        self.length = torch.zeros(sequences, dtype=torch.int32, device=device)

    def places(self, sequence: Tensor, position: Tensor, kept: Tensor) -> list[Tensor]:
        """Where `write` puts n rows of some sequences, for each layer: [n of all] int64.

        sequence: [Q] int64, distinct; position: [Q, n] int64, ascending; kept: [Q] int64, how many
        of the n stay, the first ones
        """
        i = torch.arange(position.shape[1], device=position.device)
        end = position[:, :1] + kept[:, None]
        found = {}
        for S in set(self.rows):
            stays = (i < kept[:, None]) & (position >= end - S)
            row = sequence[:, None] * S + position % S
            found[S] = torch.where(stays, row, len(self.length) * S).flatten()
        return [found[S] for S in self.rows]

    def write(self, layer: int, place: Tensor, k: Tensor, v: Tensor) -> None:
        """place: of the layer, from `places`; k, v: [n of all, kv_heads, head]"""
        self._k[layer][place] = k
        self._v[layer][place] = v
