"""Models, from their directories. One module list serves all families; see config/families.py."""

import logging
from collections.abc import Iterator
from pathlib import Path

from kdtree.config import ModelConfig
from kdtree.config import load as load_config
from kdtree.models.deepseek import Deepseek
from kdtree.weights import Checkpoint, Progress, load

__all__ = ["Deepseek", "check_skipped", "load_model"]

logger = logging.getLogger(__name__)


def load_model(
    directory: Path,
    *,
    device,
    dtype,
    positions: int | None = None,
    quantize: str | None = None,
    progress: Progress | None = None,
) -> Deepseek:
    """Loads a model directory in Hugging Face layout.

    device, dtype: where and as what the weights are kept; positions: of the rotary table, the
    model's own longest by default; quantize, progress: as kdtree.weights.load takes them
    Tensors that the model has no use for by rule (images, multi-token prediction) are skipped, and
    a warning of this module's logger says so.
    Raises ConfigError or CheckpointError.
    """
    config = load_config(Path(directory))

    def build(weights):
        return Deepseek(config, weights, positions or config.max_positions)

    checkpoint = Checkpoint(Path(directory), config.prefix, config.skipped)
    checkpoint.fail(check_skipped(config, checkpoint))
    for prefix, names in _skipped(config, checkpoint):
        logger.warning("skipped %s* (%s), tensors: %d", prefix, _what(config, prefix), len(names))
    how = {"device": device, "dtype": dtype, "quantize": quantize, "progress": progress}
    return load(checkpoint, build, **how)


def check_skipped(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """What is wrong with the tensors that are skipped: they must be what the rules are for."""
    return [
        f"{prefix}* is beyond num_hidden_layers = {config.layers}, and no layer of"
        f" {_what(config, prefix)}, which would have eh_proj.weight"
        for prefix, names in _skipped(config, checkpoint)
        if prefix in config.mtp and f"{prefix}eh_proj.weight" not in names
    ]


def _skipped(config: ModelConfig, checkpoint: Checkpoint) -> Iterator[tuple[str, list[str]]]:
    """The prefixes of skipped tensors that there are, and their names as stored."""
    for prefix in config.skipped:
        names = [name for name in checkpoint.skipped if name.startswith(prefix)]
        if names:
            yield prefix, names


def _what(config: ModelConfig, prefix: str) -> str:
    return "multi-token prediction" if prefix in config.mtp else "images"
