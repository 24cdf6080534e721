"""The files of a model directory beside its weights."""

import json
import os
from pathlib import Path


def has_file(path: Path, error: type[Exception]) -> bool:
    """Whether it is there. Raises the given error on what is there but no file, or cannot be seen.

    A directory or a broken link of the name is a download that went wrong, not a file left out.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as cause:
        raise error(f"{path} cannot be read: {cause}") from None
    if not os.path.isfile(path):
        raise error(f"{path} is no regular file, wants a file or nothing of that name")
    return True


def read_object(path: Path, error: type[Exception]) -> dict:
    """The object that a JSON file holds. Raises the given error where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} cannot be read as JSON: {cause}") from None
    if not isinstance(value, dict):
        raise error(f"{path} holds a {type(value).__name__}, wants an object")
    return value
