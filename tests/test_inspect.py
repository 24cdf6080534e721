"""The command `inspect`: what a directory holds, and all that is wrong with it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizer_files import write_deepseek
from variants import names, variant

from kdtree import cli
from kdtree.cli import units
from kdtree.text import load_tokenizer

FILE = "model.safetensors"


@pytest.fixture
def copy(tmp_path):
    """A model directory to spoil, and its tensors."""
    shutil.copytree(variant("int4"), tmp_path / "model")
    return tmp_path / "model", load_file(tmp_path / "model" / FILE)


def run(capsys, directory, *flags):
    code = cli.main(["inspect", str(directory), *flags])
    out, err = capsys.readouterr()
    return code, out, err


def facts(capsys, directory):
    code, out, err = run(capsys, directory, "--json")
    assert err == ""
    found = json.loads(out)
    assert code == (1 if found["problems"] else 0)
    return found


@pytest.mark.parametrize("name", names())
def test_every_variant_is_whole(name, capsys):
    found = facts(capsys, variant(name))
    assert found["problems"] == []
    files = [load_file(file) for file in variant(name).glob("model*.safetensors")]
    tensors = [tensor for file in files for tensor in file.values()]
    assert sum(row["tensors"] for row in found["tensors"]) == len(tensors)
    assert sum(row["bytes"] for row in found["tensors"]) == sum(
        tensor.numel() * tensor.itemsize for tensor in tensors
    )


def test_tensors_by_part_and_format(copy, capsys):
    directory, tensors = copy
    rows = {(r["part"], r["stored_as"]): r for r in facts(capsys, directory)["tensors"]}
    config = json.loads((directory / "config.json").read_text())
    routed = rows["routed experts", "int4"]
    layers = config["num_hidden_layers"] - config["first_k_dense_replace"]
    matrices = 3 * layers * config["n_routed_experts"]
    assert routed["tensors"] == 3 * matrices  # codes, scales and shape of each
    assert routed["parameters"] == (
        matrices * config["hidden_size"] * config["moe_intermediate_size"]
    )
    assert routed["dtypes"] == sorted(
        {str(t.dtype).removeprefix("torch.") for n, t in tensors.items() if ".experts." in n}
    )
    assert rows["router", "float32"]["parameters"] == layers * config["n_routed_experts"]
    assert rows["head", "bfloat16"]["tensors"] == 1
    assert all(row["used"] for row in rows.values())


def test_the_table(copy, capsys):
    directory, tensors = copy
    code, out, err = run(capsys, directory)
    assert (code, err) == (0, "") and out.endswith("0 problems\n")
    size = sum(t.numel() * t.itemsize for n, t in tensors.items() if ".experts." in n)
    line = next(line for line in out.splitlines() if "routed experts" in line)
    assert "int4" in line and units.show(size, "B") in line
    assert "model: vocab 512" in out and "kv_lora_rank" in out and "experts_per_token" in out
    assert "tokenizer: none, no chat template" in out


def test_config_in_the_library_s_terms(capsys):
    config = facts(capsys, variant("yarn"))["config"]
    stored = json.loads((variant("yarn") / "config.json").read_text())
    yarn = config["mla"]["rotary"]["yarn"]
    assert yarn["mscale_all_dim"] == stored["rope_parameters"]["mscale_all_dim"]
    assert config["moe"]["experts_per_token"] == stored["num_experts_per_tok"]
    assert facts(capsys, variant("dense"))["config"]["moe"] is None


def test_problems_are_all_named(copy, capsys):
    directory, tensors = copy
    tensors["lm_head.weights"] = tensors.pop("lm_head.weight")
    tensors["extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = torch.zeros(128, dtype=torch.int32)
    save_file(tensors, directory / FILE)
    problems = facts(capsys, directory)["problems"]
    wants = [
        ("extra.weight", "not used"),
        ("lm_head.weight", "missing"),
        ("lm_head.weights", "not used"),
        (name, "int32"),
        ("model.norm.weight", "[127]", "[128]"),
    ]
    assert len(problems) == len(wants)
    for problem, parts in zip(sorted(problems), wants, strict=True):
        assert all(part in problem for part in parts)
    code, out, _ = run(capsys, directory)
    assert code == 1 and out.endswith("5 problems\n")
    assert all(f"PROBLEM: {problem}\n" in out for problem in problems)
    line = next(line for line in out.splitlines() if line.strip().startswith("unknown"))
    assert line.rstrip().endswith("not used")


def test_a_layer_too_many_is_named(copy, capsys):
    """As load_model does, which skips layers beyond the last only where they predict tokens."""
    directory, tensors = copy
    layers = facts(capsys, directory)["config"]["layers"]
    tensors[f"model.layers.{layers}.input_layernorm.weight"] = torch.ones(128)
    save_file(tensors, directory / FILE)
    (problem,) = facts(capsys, directory)["problems"]
    assert problem.startswith(f"model.layers.{layers}.* is beyond num_hidden_layers = {layers}")
    assert run(capsys, directory)[0] == 1


def test_missing_shard(tmp_path, capsys):
    directory = tmp_path / "model"
    shutil.copytree(variant("kimi"), directory)
    rows = {row["part"]: row for row in facts(capsys, directory)["tensors"]}
    assert not rows["vision_tower"]["used"] and rows["attention"]["used"]
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    found = facts(capsys, directory)
    assert found["tensors"] == [] and f"{shard.name} is missing" in found["problems"][0]


def test_tokenizer_and_chat_template(copy, capsys):
    directory, _ = copy
    found = facts(capsys, directory)
    assert found["tokenizer"] is found["tokens"] is None and found["text_files"] == []
    write_deepseek(directory)
    found = facts(capsys, directory)
    tokens = len(load_tokenizer(directory))
    assert (found["tokenizer"], found["tokens"]) == ("tokenizer.json", tokens)
    for text, has in (("{}", False), ('{"chat_template": "x"}', True)):
        (directory / "tokenizer_config.json").write_text(text)
        assert facts(capsys, directory)["chat_template"] is has
    (directory / "tokenizer_config.json").unlink()
    (directory / "chat_template.jinja").touch()
    found = facts(capsys, directory)
    assert found["chat_template"] is True and found["problems"] == []
    assert found["text_files"] == ["tokenizer.json", "chat_template.jinja"]
    out = run(capsys, directory)[1]
    assert "text files: tokenizer.json, chat_template.jinja" in out
    assert f"tokenizer: tokenizer.json of {tokens:,} tokens, a chat template" in out


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", None])
def test_text_files_that_do_not_load(copy, capsys, name, content):
    """Named once, beside the tensors, which are listed as ever. None: a directory"""
    directory, _ = copy
    whole = facts(capsys, directory)["tensors"]
    write_deepseek(directory)
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir() if content is None else (directory / name).write_text(content)
    found = facts(capsys, directory)
    (problem,) = found["problems"]
    assert str(directory / name) in problem and found["tensors"] == whole
    assert found["tokens"] is None and name in found["text_files"]
    assert run(capsys, directory)[0] == 1


def test_mistakes(tmp_path, capsys):
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "") and "has no config.json" in err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "") and "model_type is 'llama', supported: deepseek_v2" in err
