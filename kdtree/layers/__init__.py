"""The layers that model families are built from: parameters and ops, no policy."""

from kdtree.layers.linear import Int4Linear, Linear, stored_linear
from kdtree.layers.mla import Mla
from kdtree.layers.moe import Mlp, Moe
from kdtree.layers.rms_norm import RmsNorm
from kdtree.layers.rope import rope_table, rotate_halves

__all__ = [
    "Int4Linear",
    "Linear",
    "Mla",
    "Mlp",
    "Moe",
    "RmsNorm",
    "rope_table",
    "rotate_halves",
    "stored_linear",
]
