"""Checkpoints on disk, and the strict loading of a model's tensors from them."""

from kdtree.weights.checkpoint import Checkpoint
from kdtree.weights.loader import Weights, check, load
from kdtree.weights.reader import Progress, Reading

__all__ = ["Checkpoint", "Progress", "Reading", "Weights", "check", "load"]
