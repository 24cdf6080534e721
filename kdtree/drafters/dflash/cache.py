"""The drafter's keys and values of committed tokens, one ring of rows a layer and sequence."""

import torch
from torch import Tensor

from kdtree import ops
from kdtree.cache import require_room
from kdtree.drafters.dflash.config import Architecture
from kdtree.tree import MAX_DEPTH


class ContextCache:
    """Keys and values of B sequences of up to max_seq_len tokens, the keys normed and rotated.

    length: [B] int32, tokens committed; position p of layer l is row p % S of layers[l]
    data: [B * sum(rows), 2, kv_heads, head], a layer's rows after another's
    layers: views of it, [B, S, 2, kv_heads, head] each; rows: their S
    windows: per layer, 0 where S holds every position
    Reserved: 2 * B * S * kv_heads * head elements a layer, S = max_seq_len + 16 where the layer
    sees all, or its window where that is less.
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
        self.eps = c.norm_eps
        most = max_seq_len + MAX_DEPTH + 1  # a last round may commit beyond the end
        self.windows = [a.window if 0 < a.window <= most else 0 for a in c.attention]
        self.rows = [window or most for window in self.windows]
        shape = (sequences * sum(self.rows), 2, c.kv_heads, c.head)
        what = f"the drafter's cache of {sequences} x {max_seq_len} tokens"
        require_room(what, torch.Size(shape).numel() * dtype.itemsize, device)
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        each = self.data.split([sequences * S for S in self.rows])
        self.layers = [rows.unflatten(0, (sequences, -1)) for rows in each]
        self.length = torch.zeros(sequences, dtype=torch.int32, device=device)

    def write(
        self,
        kv: Tensor,
        k_norm: Tensor,
        rope: Tensor,
        first: int,
        start: Tensor,
        path: Tensor | None,
        kept: Tensor | None,
    ) -> None:
        """Of the sequences from `first` on; arguments as in ops.block_append."""
        ops.block_append(self.data, kv, k_norm, self.eps, rope, start, path, kept, self.rows, first)
