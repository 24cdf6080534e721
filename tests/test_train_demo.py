"""The demo model: the way from text to a model directory, in miniature, and what ships.

The toy goes through every stage but the downloads: Python's own files and docstrings are its text.
"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import demo_training.corpus
import pytest
import torch
import torch.nn.functional as F
import train_demo
from demo_training.check import Reader, check
from safetensors.torch import load_file, save_file

from kdtree import Engine, SamplingParams
from kdtree.cache import KvCache
from kdtree.models import load_model
from kdtree.tree import TokenTree

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "kdtree" / "demo"
LOG = json.loads((DEMO / "train_log.json").read_text())
TRAIN = "train --device cpu --small --seconds 1.5 --batch 4 --length 64"

# Two float32 forwards agree to 5e-7 here; elsewhere a routing tie may move one token of the 256.
FLOAT32 = 1e-4


def docstrings(path: Path) -> bytes:
    """A page of what the file says about itself."""
    nodes = ast.walk(ast.parse(path.read_text()))
    places = (ast.Module, ast.ClassDef, ast.FunctionDef)
    said = [ast.get_docstring(n) for n in nodes if isinstance(n, places)]
    return "".join(f"<p>{escape(s)}</p>" for s in said if s).encode()


def files(out: Path):
    """In place of the downloads: what `demo_training.sources.unpack` yields."""
    for path in sorted(Path(ast.__file__).parent.glob("*.py"))[:60]:
        yield "code", "stdlib", "1", "PSF-2.0", path.name, path.read_bytes
        yield "prose", "docs", "1", "PSF-2.0", path.name, lambda path=path: docstrings(path)


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """A directory with corpus/, tokens.xz and model/."""
    out = tmp_path_factory.mktemp("toy")
    (out / "corpus").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_training.corpus, "unpack", files)
        patch.setattr(demo_training.corpus, "HELD_OUT", 4)
        train_demo.main(["corpus", "--out", str(out / "corpus")])
    train_demo.main(f"tokens --corpus {out}/corpus --out {out}/tokens.xz".split())
    # A process of its own: training sets torch's precision and a signal's handler.
    command = [sys.executable, "python/train_demo.py", *TRAIN.split()]
    command += ["--tokens", f"{out}/tokens.xz", "--out", f"{out}/model"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    return out


def test_corpus_holds_out_whole_documents(toy):
    rows = [json.loads(x) for k in ("code", "prose") for x in open(toy / f"corpus/{k}.jsonl")]
    held = {x["path"] for x in rows if x["held"]}
    assert 0.1 < sum(x["held"] for x in rows) / len(rows) < 0.4 and held
    sources = json.loads((toy / "corpus/sources.json").read_text())
    assert sum(s["files"] for s in sources) == len(rows)
    assert sum(s["bytes"] for s in sources) == sum(len(x["text"].encode()) for x in rows)


def test_trained_model_generates(toy):
    log = json.loads((toy / "model/train_log.json").read_text())
    assert log["run"]["steps"] > 5 and not log["run"]["failure"]
    assert all(math.isfinite(row["loss"]) for row in log["run"]["curve"])
    result = Engine(toy / "model", device="cpu").generate(
        "def main():", SamplingParams(max_tokens=8, ignore_eos=True)
    )
    assert len(result.completions[0].token_ids) == 8


def test_check_accepts_and_refuses(toy, tmp_path, capsys):
    model = shutil.copytree(toy / "model", tmp_path / "model")
    check(model)
    assert "in the log" in capsys.readouterr().out
    index = json.loads((model / "model.safetensors.index.json").read_text())
    file = model / index["weight_map"]["lm_head.weight"]
    tensors = load_file(file)
    tensors["lm_head.weight"].view(torch.int16)[5, 7] ^= 1 << 14  # the exponent's highest bit
    save_file(tensors, file)
    with pytest.raises(ValueError, match="differ by more than"):
        check(model)


def test_shipped_model_is_small_and_names_no_place():
    assert sum(p.stat().st_size for p in DEMO.rglob("*")) < 28e6
    for path in (*DEMO.rglob("*.json"), DEMO / "README.md"):
        assert not re.search(r"/(work|home|root|tmp|mnt|srv)/", path.read_text()), path.name


def test_readme_has_the_log_s_figures():
    text = (DEMO / "README.md").read_text()
    for kind, held in LOG["held_out"].items():
        shipped = held["int4"]
        assert f"| {kind} | {shipped['bits_per_byte']} | {shipped['nats_per_token']} |" in text
        greedy, warm = (LOG["loops"][f"{kind} T={t}"]["looping"] for t in ("0.0", "0.7"))
        assert f"| {kind} | {greedy:.1%} | {warm:.1%} |" in text
    assert f"{LOG['whole_seconds']:.0f} s" in text
    megabytes = [float(x) for x in re.findall(r"(?m)^\| [^|]+ \| ([\d.]+) \| \d+ \|", text)]
    total = sum(s["bytes"] for s in LOG["sources"]) / 1e6
    assert abs(sum(megabytes) - total) < 0.005 * len(megabytes)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["code", "prose"])
def test_shipped_model_has_its_held_out_loss(kind):
    """kdtree's forward of the windows that `check` keeps: INT4 experts, YaRN, routing, all of it.

    Against check's own reader, which shares no code, here and as the log has it.
    """
    model = load_model(DEMO, device=torch.device("cpu"), dtype=torch.float32)
    c, reader, got, read = model.config, Reader(DEMO), [], []
    for row in torch.tensor(LOG["held_out"][kind]["check"]["windows"]):
        width = c.mla.kv_lora_rank + c.mla.rope
        cache = KvCache(c.layers, width, 1, len(row), device="cpu", dtype=torch.float32)
        hidden, _ = model(cache.place(TokenTree.chain(row[None, :-1])), cache)
        got.append(float(F.cross_entropy(model.logits(hidden)[0], row[1:])))
        read.append(float(reader.loss(row)))
    assert max(abs(a - b) for a, b in zip(got, read, strict=True)) < FLOAT32
    assert abs(sum(got) / len(got) - LOG["held_out"][kind]["check"]["nats"]) < FLOAT32


def test_engine_without_a_model_is_the_shipped_one():
    engine = Engine(device="cpu")
    assert engine.config.vocab == 8192 and engine.tokenizer is not None
    assert engine.model.embed_tokens.equal(Reader(DEMO).weight("model.embed_tokens"))
