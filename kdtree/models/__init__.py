"""Models, from their directories. One module list serves all families; see config/families.py."""

import logging
from pathlib import Path

from kdtree.config import ModelConfig
from kdtree.config import load as load_config
from kdtree.errors import CheckpointError
from kdtree.models.deepseek import Deepseek
from kdtree.weights import Checkpoint, Progress, load

__all__ = ["Deepseek", "load_model"]

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
    _report_skipped(config, checkpoint)
    how = {"device": device, "dtype": dtype, "quantize": quantize, "progress": progress}
    return load(checkpoint, build, **how)


def _report_skipped(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Says which tensors are not loaded, and makes sure that they are what the rules are for."""
    for prefix in config.skipped:
        names = [name for name in checkpoint.skipped if name.startswith(prefix)]
        if not names:
            continue
        what = "images"
        if prefix in config.mtp:
            what = "multi-token prediction"
            if f"{prefix}eh_proj.weight" not in names:
                raise CheckpointError(
                    f"{checkpoint.directory}: {prefix}* is beyond num_hidden_layers ="
                    f" {config.layers}, and no layer of {what}, which would have eh_proj.weight"
                )
        logger.warning("skipped %s* (%s), tensors: %d", prefix, what, len(names))
