"""Model directories made by the oracle, once; kept in build/ while its sources are the same."""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "python/gen_model_ref.py"
SOURCES = [SCRIPT, *sorted((ROOT / "python/model_ref").glob("*.py"))]


@functools.cache
def names(drafters: bool = False) -> list[str]:
    """All variants: of models, or of drafters."""
    listing = subprocess.run(
        [sys.executable, SCRIPT, "--list"], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in listing.stdout.splitlines() if line.strip()]
    return [words[0] for words in lines if (words[1] == "drafter") == drafters]


@functools.cache
def variant(name: str) -> Path:
    """The directory of a variant, generated if it is not there."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
    out = ROOT / "build/variants" / digest / name
    if not out.is_dir():
        made = out.with_name(f"{name}.{os.getpid()}")  # whole or not there: tests run in parallel
        command = [sys.executable, SCRIPT, "--variant", name, "--out", made]
        subprocess.run(command, capture_output=True, check=True)
        try:
            made.rename(out)
        except OSError:
            shutil.rmtree(made)
    return out


@functools.cache
def golden(name: str, part: str = ".") -> dict:
    """The oracle's results, by the names that gen_model_ref.py documents. part: "drafter" or not"""
    with safe_open(variant(name) / part / "golden.safetensors", framework="np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        return tensors | {"metadata": file.metadata()}
