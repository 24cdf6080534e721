"""The layers that model families are built from: parameters and ops, no policy."""

from kdtree.layers.linear import Linear
from kdtree.layers.mla import Mla
from kdtree.layers.moe import Mlp, Moe
from kdtree.layers.rms_norm import RmsNorm
from kdtree.layers.rope import rope_table

__all__ = ["Linear", "Mla", "Mlp", "Moe", "RmsNorm", "rope_table"]
