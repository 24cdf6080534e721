"""The stage `corpus`: fetches the text, cleans it, and writes one document a line.

`code.jsonl` and `prose.jsonl` hold the documents, `sources.json` each source's version, licence
and size. Documents that would teach a small model to loop are left out: copies, near copies,
boilerplate, tables, lists of numbers, index pages. Tokens and training are not known here.
"""

import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path

from demo_training.clean import Cleaner, html_text
from demo_training.sources import SKIP_PATH, say, unpack

HELD_OUT = 100  # one file in so many is held out
SOURCE_BYTES = {"code": 5_000_000, "prose": 12_000_000}  # kept of one source at most


def corpus(out: Path) -> None:
    """Writes code.jsonl, prose.jsonl (source, path, held, text) and sources.json under out."""
    kept: dict[str, list[dict]] = {"code": [], "prose": []}
    sources, cleaner = {}, Cleaner()
    for kind, name, version, licence, path, read in unpack(out):
        entry = sources.setdefault(
            (kind, name),
            dict(kind=kind, name=name, version=version, licence=licence, files=0, bytes=0, read=0),
        )
        entry["read"] += 1
        if SKIP_PATH[kind].search("/" + path):
            continue
        text = read().decode(errors="replace")
        text = cleaner.clean(kind, html_text(text) if kind == "prose" else text)
        if text is not None:
            kept[kind].append(dict(source=name, path=path, held=False, text=text))
    for kind, documents in kept.items():
        documents = capped(without_frames(documents), SOURCE_BYTES[kind])
        with open(out / f"{kind}.jsonl", "w") as file:
            for document in documents:
                document["held"] = order(document) % HELD_OUT == 0
                file.write(json.dumps(document) + "\n")
                entry = sources[kind, document["source"]]
                entry["files"] += 1
                entry["bytes"] += len(document["text"].encode())
    (out / "sources.json").write_text(json.dumps(list(sources.values()), indent=1))
    for kind in kept:
        rows = [x for x in sources.values() if x["kind"] == kind]
        say(
            f"{kind}: {sum(x['bytes'] for x in rows) / 1e6:.1f} MB, "
            f"{sum(x['files'] for x in rows)} of {sum(x['read'] for x in rows)} files\n"
        )


def without_frames(documents: list[dict]) -> list[dict]:
    """Drops short paragraphs, of three words or more, that a quarter of a source's pages share."""
    seen, pages = Counter(), Counter(d["source"] for d in documents)
    for document in documents:
        short = {p for p in document["text"].split("\n\n") if len(p) < 60 and p.count(" ") > 1}
        seen.update((document["source"], p) for p in short)
    for document in documents:
        source = document["source"]
        document["text"] = (
            "\n\n".join(
                p
                for p in document["text"].split("\n\n")
                if seen[source, p] <= max(8, pages[source] / 4)
            ).strip("\n")
            + "\n"
        )
    return documents


def order(document: dict) -> int:
    """A number that scatters documents, the same on every machine."""
    name = f"{document['source']}/{document['path']}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=6).digest(), "little")


def capped(documents: list[dict], limit: int) -> list[dict]:
    """Documents in a scattered order, at most `limit` bytes of any one source."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for document in sorted(documents, key=order):
        taken[document["source"]] += len(document["text"])
        if taken[document["source"]] <= limit:
            chosen.append(document)
    return chosen
