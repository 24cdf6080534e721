"""The stage `tokens`: trains the tokenizer and turns the text into one compressed token file."""

import json
import lzma
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_training.sources import say

VOCAB = 8192
EOT, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"  # ids 0, 1, 2


def tokens(corpus: Path, out: Path, millions: float, share: float, own: Path | None) -> None:
    """Trains the tokenizer, tokenises, and writes one compressed file.

    millions: of training tokens, at most; share: of them that are code; own: the tokenizer.json of
    a model, in place of one trained here. The file, all xz: the
    length of a JSON header (uint32), the header, then the sets it names, one after the other,
    as uint16. A document begins with EOT.
    """
    documents = {k: [json.loads(x) for x in open(corpus / f"{k}.jsonl")] for k in ("code", "prose")}
    tokenizer = Tokenizer.from_file(str(own)) if own else trained(documents)
    sets, limit = {"train": []}, {"code": share, "prose": 1 - share}
    for kind, group in documents.items():
        sets[f"held_{kind}"] = list(encoded(tokenizer, [d for d in group if d["held"]]))
        room = limit[kind] * millions * 1e6
        for row in encoded(tokenizer, [d for d in group if not d["held"]]):
            room -= len(row)
            if room < 0:
                break
            sets["train"].append(row)
        say(f"{kind}: {room / 1e6:.2f} M tokens short of its share\n")
    flat = {name: np.concatenate(rows) for name, rows in sets.items()}
    header = dict(
        tokenizer=tokenizer.to_str(),
        sets={n: len(x) for n, x in flat.items()},
        documents={n: len(x) for n, x in sets.items()},
        sources=json.loads((corpus / "sources.json").read_text()),
    )
    packed = json.dumps(header).encode()
    filters = [
        dict(
            id=lzma.FILTER_LZMA2,
            preset=9 | lzma.PRESET_EXTREME,
            dict_size=1 << 28,
            lc=3,
            lp=1,
            pb=1,
        )
    ]
    with lzma.open(out, "wb", format=lzma.FORMAT_XZ, filters=filters) as file:
        file.write(struct.pack("<I", len(packed)) + packed)
        for name, row in flat.items():
            say(f"compressing {name}: {len(row) / 1e6:.2f} M tokens\n")
            file.write(row.tobytes())
    say(f"{out}: {out.stat().st_size / 1e6:.1f} MB\n")


def encoded(tokenizer: Tokenizer, documents: list[dict]) -> Iterator[np.ndarray]:
    for at in range(0, len(documents), 500):
        for row in tokenizer.encode_batch_fast([d["text"] for d in documents[at : at + 500]]):
            yield np.array([0, *row.ids], np.uint16)


def trained(documents: dict[str, list[dict]]) -> Tokenizer:
    """Byte-level BPE of VOCAB ids; words keep one mark before them, indents are one piece."""
    texts = [d["text"] for k in documents for d in documents[k] if not d["held"]]
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]+[ \t]*|"
        r"[ \t]+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOT, PAD, MASK],
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts[:: max(1, len(texts) // 12000)], trainer)
    return tokenizer


def read_tokens(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """The header and the sets of a token file."""
    with lzma.open(path) as file:
        (size,) = struct.unpack("<I", file.read(4))
        header = json.loads(file.read(size))
        sets = {n: np.frombuffer(file.read(2 * k), np.uint16) for n, k in header["sets"].items()}
    return header, sets
