"""Checkpoints on disk, and the strict loading of a model's tensors from them."""

from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.loader import Weights, check, load

__all__ = ["Checkpoint", "Weights", "check", "load"]
