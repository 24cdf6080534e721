"""Which tokenizer a model directory has."""

from pathlib import Path

from kdtree.errors import CheckpointError
from kdtree.files import has_file
from kdtree.text.byte_level import ByteLevelTokenizer
from kdtree.text.tokenizer import Tokenizer

TOKENIZERS = "tokenizer.json (byte-level BPE), tiktoken.model (Kimi)"
FILES = ("tiktoken.model", "tokenizer.json")


def tokenizer_file(directory: str | Path) -> str | None:
    """The file that the tokenizer is read from: tiktoken.model or tokenizer.json; None of neither.

    Where both are, tiktoken.model is taken: that is what Kimi's checkpoints are published with, a
    tokenizer.json beside it is somebody's conversion.
    Raises CheckpointError where one of the names is no file's.
    """
    there = [file for file in FILES if has_file(Path(directory) / file, CheckpointError)]
    return there[0] if there else None


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of the file that is there, None without one. Raises as the tokenizers do."""
    file = tokenizer_file(directory)
    if file == "tiktoken.model":
        from kdtree.text.kimi import KimiTokenizer  # tiktoken is imported where it is needed alone

        return KimiTokenizer(directory)
    return ByteLevelTokenizer(directory) if file else None
