"""The command `plan`: what it reads, prints and refuses; the document that shows its output."""

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from says import says
from variants import variant

from kdtree import CheckpointError, ConfigError, cli
from kdtree.cli import units
from kdtree.plan import read

ROOT = Path(__file__).parent.parent
KIMI = ROOT / "tests/data/kimi-k2.6/config.json"
DEEPSEEK = ROOT / "tests/data/deepseek-v3/config.json"


@pytest.fixture
def copy(tmp_path):
    def copied(name):
        shutil.copytree(variant(name), tmp_path / "model")
        return tmp_path / "model"

    return copied


def run(capsys, *arguments):
    code = cli.main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_skipped_tensors_are_named_with_their_bytes(copy, capsys):
    directory = copy("kimi")
    shards = [load_file(file) for file in directory.glob("model-*.safetensors")]
    size = sum(
        tensor.numel() * tensor.itemsize
        for shard in shards
        for name, tensor in shard.items()
        if name.startswith("vision_tower.")
    )
    code, out, _ = run(capsys, directory)
    assert code == 0
    assert f"vision_tower: {units.show(size, 'B')} in the checkpoint, not loaded" in out
    facts = json.loads(run(capsys, directory, "--json")[1])
    assert facts["skipped_bytes"]["vision_tower"] == size > 0
    assert facts["from"] == "headers"


def test_mtp_layers_are_no_part_of_the_model(copy, capsys):
    directory = copy("base")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    before = json.loads(run(capsys, directory, "--json")[1])
    tensors[f"model.layers.{layers}.eh_proj.weight"] = torch.zeros(4, 8, dtype=torch.bfloat16)
    tensors[f"model.layers.{layers}.self_attn.o_proj.weight"] = torch.zeros(6, dtype=torch.float32)
    save_file(tensors, file)
    after = json.loads(run(capsys, directory, "--json")[1])
    assert after["skipped_bytes"] == {"MTP layers": 4 * 8 * 2 + 6 * 4}
    assert after["rank_bytes"] == before["rank_bytes"]


def test_headers_that_the_config_contradicts(copy, capsys):
    directory = copy("base")
    tensors = load_file(directory / "model.safetensors")
    lost = tensors.pop("lm_head.weight").numel()
    save_file(tensors, directory / "model.safetensors")
    code, out, _ = run(capsys, directory)
    assert code == 0
    assert f"head: the headers hold 0 parameters, the config implies {lost:,}" in out


def test_experts_that_the_config_knows_nothing_of(copy, capsys):
    directory = copy("base")
    config = json.loads((directory / "config.json").read_text())
    config["first_k_dense_replace"] = config["num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    code, out, _ = run(capsys, directory)
    assert code == 0 and "routed experts: the headers hold" in out


def test_incomplete_directories(copy, tmp_path):
    directory = copy("kimi")
    whole = read(directory / "config.json")
    shard = next(directory.glob("model-*.safetensors"))
    shard.unlink()
    with says(CheckpointError, shard.name, "is missing"):
        read(directory)
    for file in directory.glob("model*"):
        file.unlink()
    assert read(directory).tensors == whole.tensors  # a config alone
    with says(ConfigError, "nowhere does not exist"):
        read(tmp_path / "nowhere")


def test_formats_are_those_of_the_headers(copy):
    """FP8 and its scales by what is stored, whatever the config says."""
    directory = copy("base")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.ones(-(-rows // 128), -(-columns // 128))
    save_file(tensors, directory / "model.safetensors")
    found = [each for each in read(directory).tensors if each.stored_as == "fp8"]
    assert sum(each.parameters for each in found) == rows * columns
    assert sum(each.bytes for each in found) == rows * columns + 4 * (
        -(-rows // 128) * -(-columns // 128)
    )
    assert sum(each.held_bytes(False) for each in found) == 2 * rows * columns


def test_json_is_one_object(capsys):
    code, out, err = run(capsys, KIMI, "--gpus", 8, "--nodes", "8,1", "--context", 1024, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["parameters"] == 1_026_408_232_448 and facts["rank_bytes"] == 76_512_894_976
    assert [step["nodes"] for step in facts["steps_ms"]] == [1, 8]
    assert facts["legal_sizes"] == [1, 2, 4, 8, 16, 32, 64]
    assert facts["context"] == 1024 and facts["cache_bytes_per_token"] == 70_272
    assert facts["illegal_sizes"]["5"][0] == "64 heads do not divide evenly"


def test_options_reach_the_plan(capsys):
    flags = ("--gpus", 4, "--gpu-memory", "96GiB", "--reserve", "1GB", "--bandwidth", "8 TB/s")
    machine = json.loads(run(capsys, DEEPSEEK, *flags, "--peak", "2PFLOP/s", "--json")[1])[
        "machine"
    ]
    assert machine == {
        "gpus": 4, "memory": 96 * 2**30, "reserve": 1e9, "bandwidth": 8e12, "peak": 2e15
    }  # fmt: skip
    code, out, _ = run(capsys, DEEPSEEK, *flags)
    assert code == 0 and "DOES NOT FIT: weights and reserve take 338.3 GB a GPU" in out
    out = " ".join(out.split())
    assert "8 TB/s (as given)" in out and "not built yet" in out
    out = run(capsys, DEEPSEEK, *flags, "--quantize", "int4", "--gpus", 8)[1]
    assert "Longest context that fits" in out
    out = run(capsys, KIMI, "--gpus", 8, "--kv-cache-dtype", "fp8")[1]
    assert "KV cache: 40,016 bytes a token on every rank, in FP8" in " ".join(out.split())
    facts = json.loads(run(capsys, KIMI, "--gpus", 8, "--kv-cache-dtype", "fp8", "--json")[1])
    assert (facts["cache_bytes_per_token"], facts["kv_cache_dtype"]) == (40_016, "fp8")
    out = run(capsys, KIMI, "--gpus", 8, "--gpu-memory", "84GB", "--context", 100_000)[1]
    assert "The context asked for, 100,000, DOES NOT FIT" in " ".join(out.split())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--gpu-memory", "141"], "gpu-memory is '141', wants a quantity such as 141GB or 96GiB"),
        (["--gpu-memory", "-1GB"], "gpu-memory is '-1GB'"),
        (["--gpu-memory", "0GB"], "gpu-memory is '0GB'"),
        (["--bandwidth", "4TB"], "bandwidth is '4TB', wants a quantity such as 4.42TB/s"),
        (["--nodes", "0"], "nodes is '0', wants numbers of 1 to 64"),
        (["--nodes", "1,65"], "nodes is '1,65'"),
        (["--nodes", "a"], "nodes is 'a'"),
        (["--gpus", "0"], "gpus is 0, wants 1 to 1024"),
        (["--gpus", "3"], "gpus is 3, but 64 heads do not divide evenly"),
        (["--kv-cache-dtype", "fp4"], "kv_cache_dtype is 'fp4', wants 'auto' or 'fp8'"),
        (["--context", "0"], "context is 0, wants at least 1"),
        (["--context", "262145"], "context is 262145, the model has 262144"),
    ],
)
def test_mistakes(capsys, flags, message):
    code, out, err = run(capsys, KIMI, *[f"{flags[0]}={flags[1]}"])
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, value",
    [("141GB", 141e9), ("96GiB", 96 * 2**30), ("1.5 tb", 1.5e12), ("80 gib", 80 * 2**30),
     (".5GB", 5e8), ("70000B", 7e4)],
)  # fmt: skip
def test_quantities_are_read(text, value):
    assert units.parse("x", text, "B", "1GB") == value


def test_quantities_are_written():
    shown = [units.show(v, "B") for v in (0, 999, 1000, 70_272, 999_960, 76_512_894_976, 1.3e12)]
    assert shown == ["0 B", "999 B", "1 kB", "70.27 kB", "1 MB", "76.51 GB", "1.3 TB"]
    assert units.count(1_026_408_232_448) == "1.026 T" and units.count(168) == "168"
    with pytest.raises(ValueError, match="wants a quantity"):
        units.parse("x", "9" * 400 + "GB", "B", "1GB")
    assert math.isclose(units.parse("x", units.show(4.42e12, "B/s"), "B/s", ""), 4.42e12)


def test_document_shows_what_the_commands_print(capsys, monkeypatch):
    """Each marked block of docs/scaleup.md is the output of the command that stands above it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs/scaleup.md").read_text()
    blocks = re.findall(r"    \$ kdtree (plan [^\n]*)\n\n```text\n(.*?)```\n", text, re.DOTALL)
    assert len(blocks) == 4
    assert {"tests/data/kimi-k2.6/config.json", "tests/data/deepseek-v3/config.json"} <= {
        shlex.split(command)[1] for command, _ in blocks
    }
    for command, block in blocks:
        assert cli.main(shlex.split(command)) == 0
        printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
        assert block.strip("\n") == printed.strip("\n"), command


def test_document_quotes_the_results():
    """Each row of its table of measured kernels is one of benchmarks/results/ops_cuda.json."""
    rows = json.loads((ROOT / "benchmarks/results/ops_cuda.json").read_text())["rows"]
    measured = {
        (row["op"], ", ".join(f"{k} {v}" for k, v in row["shape"].items()), row["weights"] or ""):
        (f"{row['us']:.1f}", f"{row['floor_us']:.1f}")
        for row in rows
    }  # fmt: skip
    text = (ROOT / "docs/scaleup.md").read_text()
    quoted = re.findall(r"\| `(\w+)` \| ([^|]+) \| (\w*) \| ([\d.]+) \| ([\d.]+) \|", text)
    assert len(quoted) == 10
    for op, shape, weights, *times in quoted:
        assert measured[op, shape, weights] == tuple(times)
