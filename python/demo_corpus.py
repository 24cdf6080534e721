"""The demo model's text: fetches it, cleans it, and turns it into one compressed token file.

Two stages of `python/train_demo.py`:

    python python/train_demo.py corpus --out corpus
    python python/train_demo.py tokens --corpus corpus --out tokens.xz

Sources are permissively licensed and to be had on any Debian machine: the standard library of
the running Python, Debian documentation packages (`apt-get download`, unpacked, their pages
stripped to text) and PyPI wheels (`pip download --no-deps`). `corpus` writes `code.jsonl` and
`prose.jsonl` (one document a line) and `sources.json`: each source's version, licence and size.
Documents that would teach a small model to loop are left out: copies, near copies, boilerplate,
tables, lists of numbers, index pages. Training itself is not known here.
"""

import gzip
import hashlib
import json
import lzma
import re
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_clean import Cleaner, html_text

VOCAB = 8192
EOT, PAD, MASK = "<|endoftext|>", "<|pad|>", "<|mask|>"  # ids 0, 1, 2
HELD_OUT = 100  # one file in so many is held out
SOURCE_BYTES = {"code": 5_000_000, "prose": 12_000_000}  # kept of one source at most

DEBIAN = {
    "PSF-2.0": "python3.11-doc",
    "PostgreSQL": "postgresql-doc-15",
    "public-domain": "sqlite3-doc",
    "Apache-2.0": """
    apache2-doc python-tornado-doc python-requests-doc python-aiohttp-doc python-xarray-doc
    erlang-doc python-oslo.config-doc python-taskflow-doc python-openstacksdk-doc
    python-elasticsearch-doc python-coverage-doc python-pymongo-doc python-selenium-doc nova-doc
    neutron-doc cinder-doc keystone-doc glance-doc heat-doc ironic-doc swift-doc octavia-doc
    designate-doc manila-doc barbican-doc trove-doc ceilometer-doc watcher-doc senlin-doc
    tomcat10-docs ant-doc openvswitch-doc crystal-doc""",
    "MIT OR Apache-2.0": "rust-doc",
    "MIT": """
    nodejs-doc python-sqlalchemy-doc python-attr-doc python-pytest-doc twisted-doc
    python-setuptools-doc python-mako-doc python-peewee-doc python-nibabel-doc
    python-pyparsing-doc python-cffi-doc python-lark-doc python-gevent-doc krb5-doc nim-doc
    libfmt-doc""",
    "BSD-3-Clause": """
    cmake-doc python-django-doc python-scipy-doc python-pandas-doc python-sklearn-doc
    python-flask-doc python-werkzeug-doc python-jinja2-doc python-sympy-doc
    python-statsmodels-doc python-skimage-doc python-h5py-doc python-dask-doc
    python-markdown-doc python-astropy-doc python-ipython-doc python-distributed-doc
    python-scrapy-doc python-biopython-doc python-babel-doc python-traitlets-doc
    python-jupyter-client-doc python-nbconvert-doc python-djangorestframework-doc
    python-reportlab-doc python-pint-doc python-mpmath-doc dpdk-doc ghc-doc pybind11-doc
    python-mpi4py-doc""",
    "BSD-2-Clause": "sphinx-doc nginx-doc varnish-doc",
    "HPND": "python-pil-doc",
    "Apache-2.0 OR BSD-3-Clause": "python-cryptography-doc",
    "Apache-2.0 WITH LLVM-exception": "llvm-14-doc clang-14-doc",
    "BSL-1.0": "libboost1.74-doc",
}
PYPI = {
    "BSD-3-Clause": """
         django numpy scipy sympy networkx pandas flask jinja2 werkzeug click scikit-learn
    scikit-image statsmodels astropy dask distributed bokeh ipython nbconvert traitlets
    starlette     uvicorn httpx celery kombu seaborn sqlparse shapely geopandas h5py tables
    fsspec mne nilearn     pytensor pyomo scrapy prompt-toolkit pyglet music21 lxml markdown
    reportlab pypdf toolz     wagtail djangorestframework biopython""",
    "MIT": """
         sqlalchemy urllib3 attrs pytest twisted mypy black jedi parso pip setuptools poetry
    hatch     virtualenv tox fastapi pydantic anyio redis jsonschema marshmallow alembic mako
    spacy polars     sqlglot lark pyparsing zarr nibabel mitmproxy rich textual arcade manim
    simpy gymnasium     stable-baselines3 beautifulsoup4 openpyxl python-docx pdfminer-six
    fonttools pyyaml more-itertools peewee trimesh gpytorch botorch optuna sanic""",
    "PSF-2.0": "matplotlib",
    "Apache-2.0": """
         requests aiohttp tornado xarray pymongo boto3 nltk keras jax optax luigi
    apache-airflow-core     prefect dagster mlflow-skinny streamlit gradio cython pymc arviz
    cvxpy qiskit cirq-core     pennylane nova neutron cinder keystone openmdao mesa
    sortedcontainers transformers datasets     accelerate peft huggingface-hub lightning timm
    pyro-ppl""",
    "public-domain": "docutils",
    "BSD-2-Clause": "sphinx fabric invoke numba imageio xlsxwriter",
    "MIT OR Apache-2.0": "trio",
    "Apache-2.0 OR BSD-3-Clause": "cryptography",
    "HPND": "pillow",
}

Files = Iterator[tuple[str, Callable[[], bytes]]]
SKIP_PATH = {  # pages of lists, histories, other languages; tests and tables in code
    "prose": re.compile(
        r"/_sources/|/_modules/|/_static/|genindex|modindex|/search|change|whatsnew|history|release|"
        r"copyright|licen[cs]e|/news|authors|contributors|print\.html|_gallery|sg_execution|glossary|"
        r"errcodes|keywords|rust-doc/html/(core|alloc|proc_macro|test|src|rustc|unstable-book|clippy|"
        r"implementors|std/arch|std/simd)/|ghc-doc/html/lib|dpdk-doc/html/api|doxygen|manual/(da|de|es|fr|ja|ko|pt-br|ru|tr|zh-cn)/|/tests?/",
        re.I,
    ),
    "code": re.compile(
        r"/tests?/|/testing/|(^|/)test_[^/]*$|_tests?\.py|conftest|/locale|_pb2|/data/|unicode|encodings/|"
        r"lib2to3/|idlelib/|turtledemo/|entities|vendor|versions/|migrations/|lextab|yacctab|_stubs|"
        r"thirdparty|externals?/|_builtins\.py|site-packages/|/generated|licen[cs]e|xstatic|lexers/_",
        re.I,
    ),
}


def unpack(out: Path) -> Iterator[tuple[str, str, str, str, str, Callable[[], bytes]]]:
    """Every file of every source: kind, source, version, licence, path, reader. Downloads first."""
    fetched = out / "downloads"
    fetched.mkdir(parents=True, exist_ok=True)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib).as_posix()
        yield "code", "python-stdlib", sys.version.split()[0], "PSF-2.0", name, path.read_bytes
    for kind, table, fetch in (("code", PYPI, fetch_wheel), ("prose", DEBIAN, fetch_deb)):
        for licence, names in table.items():
            for name in names.split():
                say(f"{kind}: {name}")
                version, files = fetch(name, fetched)
                for path, read in files:
                    yield kind, name, version, licence, path, read


def fetch_wheel(name: str, fetched: Path) -> tuple[str, Files]:
    pattern = f"{re.sub('[-.]', '_', name)}-[0-9]*.whl"
    if not (found := sorted(fetched.glob(pattern))):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(fetched)]
        subprocess.run([*pip, "--only-binary=:all:", name], check=True)
        found = sorted(fetched.glob(pattern))
    wheel = zipfile.ZipFile(found[-1])
    names = (n for n in sorted(wheel.namelist()) if n.endswith(".py"))
    return found[-1].name.split("-")[1], ((n, partial(wheel.read, n)) for n in names)


def fetch_deb(name: str, fetched: Path) -> tuple[str, Files]:
    if not (found := sorted(fetched.glob(f"{name}_*.deb"))):
        subprocess.run(["apt-get", "download", "-q", name], check=True, cwd=fetched)
        found = sorted(fetched.glob(f"{name}_*.deb"))
    tree = fetched / name
    if not tree.exists():
        subprocess.run(["dpkg", "-x", str(found[-1]), str(tree)], check=True)
    pages = (p for p in sorted(tree.rglob("*.html*")) if p.is_file() and not p.is_symlink())
    return found[-1].name.split("_")[1], (
        (p.relative_to(tree).as_posix(), partial(page, p)) for p in pages
    )


def page(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def say(text: str) -> None:
    print(
        f"\r\033[K{text}" if sys.stderr.isatty() else text,
        file=sys.stderr,
        flush=True,
        end="" if sys.stderr.isatty() else "\n",
    )


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


def tokens(corpus: Path, out: Path, millions: float, share: float) -> None:
    """Trains the tokenizer, tokenises, and writes one compressed file.

    millions: of training tokens, at most; share: of them that are code. The file, all xz: the
    length of a JSON header (uint32), the header, then the sets it names, one after the other,
    as uint16. A document begins with EOT.
    """
    documents = {k: [json.loads(x) for x in open(corpus / f"{k}.jsonl")] for k in ("code", "prose")}
    tokenizer = train_tokenizer(
        [d["text"] for k in documents for d in documents[k] if not d["held"]]
    )
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


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB ids; words keep one mark before them, indents are one piece."""
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
