"""What a model is, and how that is read from its checkpoint's metadata."""

from kdtree.config.hf import from_hf, load, read_json, read_rope
from kdtree.config.model import MlaConfig, ModelConfig, MoeConfig, RopeConfig, YarnConfig

__all__ = [
    "MlaConfig",
    "ModelConfig",
    "MoeConfig",
    "RopeConfig",
    "YarnConfig",
    "from_hf",
    "load",
    "read_json",
    "read_rope",
]
