"""Checkpoints on disk, and the strict loading of a model's tensors from them."""

from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.loader import Weights, load

__all__ = ["Checkpoint", "Weights", "load"]
