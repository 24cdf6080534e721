"""Where the demo model's text comes from: which packages, under which licence, and their files.

Sources are to be had on any Debian machine: the standard library of the running Python, Debian
documentation packages (`apt-get download`, unpacked) and PyPI wheels (`pip download --no-deps`).
All are permissively licensed; what a package holds under other terms, SKIP_PATH leaves out. What
else of a file is kept is not decided here.
"""

import gzip
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

DEBIAN = {
    "PSF-2.0": "python3.11-doc",
    "PostgreSQL": "postgresql-doc-15",
    "public-domain": "sqlite3-doc",
    "Apache-2.0": """
    apache2-doc python-tornado-doc python-requests-doc python-aiohttp-doc python-xarray-doc
    erlang-doc python-oslo.config-doc python-taskflow-doc python-openstacksdk-doc
    python-elasticsearch-doc python-coverage-doc python-pymongo-doc python-selenium-doc
    nova-doc neutron-doc cinder-doc keystone-doc glance-doc heat-doc ironic-doc swift-doc
    octavia-doc designate-doc manila-doc barbican-doc trove-doc ceilometer-doc watcher-doc
    senlin-doc tomcat10-docs ant-doc openvswitch-doc crystal-doc""",
    "MIT OR Apache-2.0": "rust-doc",  # but html/embedded-book, which is CC-BY-SA-4.0
    "MIT": """
    nodejs-doc python-sqlalchemy-doc python-attr-doc python-pytest-doc twisted-doc
    python-setuptools-doc python-mako-doc python-peewee-doc python-nibabel-doc
    python-pyparsing-doc python-cffi-doc python-lark-doc python-gevent-doc nim-doc libfmt-doc""",
    "BSD-3-Clause": """
    cmake-doc python-django-doc python-scipy-doc python-pandas-doc python-sklearn-doc
    python-flask-doc python-werkzeug-doc python-jinja2-doc python-sympy-doc
    python-statsmodels-doc python-skimage-doc python-h5py-doc python-dask-doc
    python-markdown-doc python-astropy-doc python-ipython-doc python-distributed-doc
    python-scrapy-doc python-biopython-doc python-babel-doc python-traitlets-doc
    python-jupyter-client-doc python-nbconvert-doc python-djangorestframework-doc
    python-reportlab-doc python-pint-doc python-mpmath-doc dpdk-doc ghc-doc pybind11-doc""",
    "BSD-2-Clause": "sphinx-doc nginx-doc varnish-doc python-mpi4py-doc",
    "HPND": "python-pil-doc",
    "Apache-2.0 OR BSD-3-Clause": "python-cryptography-doc",
    "Apache-2.0 WITH LLVM-exception": "llvm-14-doc clang-14-doc",
    "BSL-1.0": "libboost1.74-doc",
}
PYPI = {
    "BSD-3-Clause": """
    django numpy scipy sympy networkx pandas flask jinja2 werkzeug click scikit-learn
    scikit-image statsmodels astropy dask distributed bokeh ipython nbconvert traitlets
    starlette uvicorn httpx celery kombu seaborn sqlparse shapely geopandas h5py tables fsspec
    mne nilearn pytensor pyomo scrapy prompt-toolkit pyglet music21 lxml markdown reportlab
    pypdf toolz wagtail djangorestframework biopython""",
    "MIT": """
    sqlalchemy urllib3 attrs pytest twisted mypy black jedi parso pip setuptools poetry hatch
    virtualenv tox fastapi pydantic anyio redis jsonschema marshmallow alembic mako spacy
    polars sqlglot lark pyparsing zarr nibabel mitmproxy rich textual arcade manim simpy
    gymnasium stable-baselines3 beautifulsoup4 openpyxl python-docx pdfminer-six fonttools
    pyyaml more-itertools peewee trimesh gpytorch botorch optuna sanic""",
    "PSF-2.0": "matplotlib",
    "Apache-2.0": """
    requests aiohttp tornado xarray pymongo boto3 nltk keras jax optax luigi
    apache-airflow-core prefect dagster mlflow-skinny streamlit gradio cython pymc arviz cvxpy
    qiskit cirq-core pennylane nova neutron cinder keystone openmdao mesa sortedcontainers
    transformers datasets accelerate peft huggingface-hub lightning timm pyro-ppl""",
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
        r"errcodes|keywords|rust-doc/html/(embedded-book|core|alloc|proc_macro|test|src|rustc|unstable-book|clippy|"
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
