"""The JSON files of a model directory."""

import json
from pathlib import Path


def read_object(path: Path, error: type[Exception]) -> dict:
    """The object that a JSON file holds. Raises the given error where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read as JSON: {cause}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, wants an object")
    return value
