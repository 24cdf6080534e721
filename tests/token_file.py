"""A small token file of Python's own sources, in the shipped demo model's tokenizer."""

import ast
import json
import lzma
import struct
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


def write_tokens(path: Path, model: Path, files: int = 6) -> Path:
    """What `train_demo.py tokens` writes, of a few files."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [p.read_text() for p in sorted(Path(ast.__file__).parent.glob("*.py"))[:files]]
    ids = [[0, *tokenizer.encode(text).ids] for text in texts]
    sets = {
        "train": sum(ids[2:], []),
        "held_code": ids[0],
        "held_prose": ids[1],
    }
    header = dict(tokenizer=tokenizer.to_str(), sets={n: len(x) for n, x in sets.items()})
    packed = json.dumps(header).encode()
    with lzma.open(path, "wb", preset=0) as file:
        file.write(struct.pack("<I", len(packed)) + packed)
        for row in sets.values():
            file.write(np.array(row, np.uint16).tobytes())
    return path
