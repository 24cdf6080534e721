"""Which tokenizer a model directory has."""

from pathlib import Path

from kdtree.text.byte_level import ByteLevelTokenizer
from kdtree.text.tokenizer import Tokenizer

TOKENIZERS = "tokenizer.json (byte-level BPE), tiktoken.model (Kimi)"


def load_tokenizer(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of the file that is there: tokenizer.json or tiktoken.model; None of neither.

    Where both are, tiktoken.model is taken: that is what Kimi's checkpoints are published with, a
    tokenizer.json beside it is somebody's conversion.
    Raises as the tokenizers do.
    """
    if (Path(directory) / "tiktoken.model").is_file():
        from kdtree.text.kimi import KimiTokenizer  # tiktoken is imported where it is needed alone

        return KimiTokenizer(directory)
    if (Path(directory) / "tokenizer.json").is_file():
        return ByteLevelTokenizer(directory)
    return None
