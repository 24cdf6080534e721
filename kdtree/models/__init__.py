"""Model families, by the name that their config gives them."""

from pathlib import Path

from kdtree.config import load as load_config
from kdtree.models.deepseek import Deepseek
from kdtree.weights import Checkpoint, Progress, load

MODELS = {"deepseek_v3": Deepseek, "deepseek_v2": Deepseek}

__all__ = ["MODELS", "Deepseek", "load_model"]


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
    Raises ConfigError or CheckpointError.
    """
    config = load_config(Path(directory))
    family = MODELS[config.family]

    def build(weights):
        return family(config, weights, positions or config.max_positions)

    checkpoint = Checkpoint(Path(directory), config.prefix, config.skipped)
    how = {"device": device, "dtype": dtype, "quantize": quantize, "progress": progress}
    return load(checkpoint, build, **how)
