"""Writes prompts.json: 200 held-out prompts a category for acceptance.py.

    python python/train_demo.py corpus --out corpus
    python python/train_demo.py tokens --corpus corpus --out tokens.xz
    python benchmarks/make_prompts.py --tokens tokens.xz

`code` and `prose` are from files that the demo model and its drafter were not trained on, of the
same sources. `other` is out of their domain: C headers of Debian packages under permissive terms
(the corpus holds Python and documentation). A prompt is 64 tokens from the beginning of a line.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

import numpy as np  # noqa: E402
from demo_training.tokens import read_tokens  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

COUNT, LENGTH = 200, 64
END = 0  # begins a document
HEADERS = {  # licence: packages
    "public domain": "libsqlite3-dev",
    "Zlib": "zlib1g-dev",
    "curl": "libcurl4-openssl-dev",
    "MIT": "libexpat1-dev libxml2-dev",
    "BSD-2-Clause": "liblz4-dev",
    "BSD-3-Clause": "libzstd-dev",
    "libpng-2.0": "libpng-dev",
    "Apache-2.0": "libssl-dev",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "prompts.json")
    arguments = parser.parse_args()
    header, sets = read_tokens(arguments.tokens)
    tokenizer = Tokenizer.from_str(header["tokenizer"])
    documents = {kind: split(sets[f"held_{kind}"]) for kind in ("code", "prose")}
    documents["other"] = [np.array(tokenizer.encode(text).ids) for text in headers()]
    prompts = {kind: windows(each, tokenizer) for kind, each in documents.items()}
    arguments.out.write_text(json.dumps(prompts, indent=0, ensure_ascii=False) + "\n")


def split(tokens: np.ndarray) -> list[np.ndarray]:
    return [each[1:] for each in np.split(tokens, np.flatnonzero(tokens == END)) if len(each)]


def headers() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for package in " ".join(HEADERS.values()).split():
            subprocess.run(["apt-get", "download", "-q", package], check=True, cwd=directory)
            (found,) = directory.glob(f"{package}_*.deb")
            subprocess.run(["dpkg", "-x", str(found), str(directory / package)], check=True)
            for path in sorted((directory / package).rglob("*.h")):
                yield path.read_text(errors="ignore")


def windows(documents: list[np.ndarray], tokenizer: Tokenizer) -> list[str]:
    """COUNT windows that do not overlap, spread evenly over the documents."""
    choose = random.Random(0)
    line = [i for i in range(tokenizer.get_vocab_size()) if "\n" in tokenizer.decode([i])]
    long = [each for each in documents if len(each) > 4 * LENGTH]
    found, used = [], set()
    while len(found) < COUNT:
        d = len(found) % len(long) if len(found) < len(long) else choose.randrange(len(long))
        starts = np.flatnonzero(np.isin(long[d][: -2 * LENGTH], line)) + 1
        starts = [s for s in starts.tolist() if (d, s // LENGTH) not in used]
        if not starts:
            continue
        start = choose.choice(starts)
        used |= {(d, start // LENGTH + near) for near in (-1, 0, 1)}
        text = tokenizer.decode(long[d][start : start + LENGTH].tolist()).rstrip("\ufffd")
        if len(text) >= LENGTH and text not in found:
            found.append(text)
    return found


if __name__ == "__main__":
    main()
