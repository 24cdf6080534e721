"""The JSON files of a tokenizer."""

from pathlib import Path

from kdtree.errors import CheckpointError, ConfigError
from kdtree.files import has_file, read_object

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_config(directory: Path) -> dict:
    """tokenizer_config.json; empty where there is none."""
    path = directory / "tokenizer_config.json"
    return read_object(path, CheckpointError) if has_file(path, CheckpointError) else {}


def named_tokens(config: dict) -> dict[str, str]:
    """The tokens that tokenizer_config.json names by their use: {"bos_token": "<s>", ...}.

    Raises ConfigError on one that is no string, null or object with a string "content".
    """
    found = {}
    for use in NAMED:
        token = config.get(use)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[use] = text
        elif token is not None:
            raise ConfigError(f"tokenizer_config.json has {use} {token!r}, wants a string")
    return found
