"""Strict loading: whatever is wrong with a checkpoint is said, all of it, before it is used."""

import json
import shutil

import pytest
import torch
from by_hand import data, file, header
from safetensors.torch import load_file, save_file
from says import says
from variants import variant

from kdtree import CheckpointError
from kdtree.models import load_model
from kdtree.weights import Checkpoint, check, load, loader

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy(tmp_path):
    """A model directory to spoil, and its tensors."""
    shutil.copytree(variant("int4"), tmp_path / "model")
    tensors = load_file(variant("int4") / FILE)
    return tmp_path / "model", tensors


def load_whole(directory):
    return load_model(directory, device="cpu", dtype=torch.float32)


def refuses(directory, *messages):
    with pytest.raises(CheckpointError) as error:
        load_whole(directory)
    for message in messages:
        assert message in str(error.value)


@pytest.fixture
def no_memory(monkeypatch):
    """Nothing may be read but headers."""

    def read(*arguments):
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(loader, "Reader", read)


def test_names_every_offender(copy, no_memory):
    directory, tensors = copy
    packed = next(name for name in tensors if name.endswith("weight_packed"))
    tensors["lm_head.weights"] = tensors.pop("lm_head.weight")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    del tensors[packed]
    save_file(tensors, directory / FILE)
    refuses(
        directory,
        "lm_head.weight is missing",
        "lm_head.weights is not used by the model",
        "model.norm.weight has shape [127], wants [128]",
        f"{packed} is missing",
    )


def test_wrong_dtype(copy, no_memory):
    directory, tensors = copy
    head = tensors["lm_head.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    tensors["lm_head.weight"] = head.double()
    save_file(tensors, directory / FILE)
    refuses(
        directory,
        "model.norm.weight has dtype int32, wants float32, bfloat16, float16\n",
        "lm_head.weight has dtype F64, wants float32, bfloat16, float16, float8_e4m3fn",
    )


def test_every_weight_shape_that_disagrees(copy, no_memory):
    directory, tensors = copy
    names = [name for name in tensors if name.endswith("weight_shape")][:2]
    for name in names:
        tensors[name] = tensors[name] + 1
    save_file(tensors, directory / FILE)
    refuses(directory, *(f"{name} is [" for name in names))
    shape = tensors[names[0]].tolist()
    refuses(directory, f"{names[0]} is {shape}, wants {[n - 1 for n in shape]}")


def test_some_experts_in_int4_and_some_not(copy, no_memory):
    directory, tensors = copy
    for kind in ("packed", "scale", "shape"):
        del tensors[f"model.layers.1.mlp.experts.3.up_proj.weight_{kind}"]
    tensors["model.layers.1.mlp.experts.3.up_proj.weight"] = torch.zeros(64, 128).bfloat16()
    save_file(tensors, directory / FILE)
    refuses(
        directory,
        "experts.3.up_proj.weight_packed is missing",
        "experts.3.up_proj.weight_shape is missing",
        "experts.3.up_proj.weight is not used",
    )


def test_check_says_what_load_does(copy):
    directory, tensors = copy
    tensors["a"] = torch.zeros(2)
    save_file(tensors, directory / FILE)

    def build(weights):
        return weights.take("b", 3)

    problems = check(Checkpoint(directory), build, dtype=torch.float32)
    assert problems[0] == "b is missing" and problems[1] == "a is not used by the model"
    assert len(problems) == 2 + len(tensors) - 1
    with pytest.raises(CheckpointError) as error:
        load(Checkpoint(directory), build, device="cpu", dtype=torch.float32)
    assert str(error.value).splitlines()[1:] == [f"  {problem}" for problem in problems]


def test_quantize_names_a_format(copy):
    directory, _ = copy
    with says(ValueError, "quantize is 'int8', wants None or 'int4'"):
        load_model(directory, device="cpu", dtype=torch.float32, quantize="int8")


def shard(directory, tensors):
    names = sorted(tensors)
    parts = {f"part-{i}.safetensors": names[i::3] for i in range(3)}
    for part, own in parts.items():
        save_file({name: tensors[name].clone() for name in own}, directory / part)
    index = {name: part for part, own in parts.items() for name in own}
    write_index(directory, index)
    return index


def write_index(directory, index):
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))


def test_shards_load_alike(copy):
    directory, tensors = copy
    whole = load_whole(directory).state_dict()
    (directory / FILE).unlink()
    shard(directory, tensors)
    parts = load_whole(directory).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_missing_shard_and_wrong_index(copy, no_memory):
    directory, tensors = copy
    index = shard(directory, tensors)
    (directory / "part-1.safetensors").unlink()
    (directory / "part-2.safetensors").write_bytes(b"x")
    refuses(
        directory,
        "part-1.safetensors is missing",
        "part-2.safetensors is truncated: it has 1 bytes, wants at least 8",
    )
    index = shard(directory, tensors)
    moved = next(name for name, part in index.items() if part == "part-0.safetensors")
    write_index(directory, index | {moved: "part-2.safetensors"})
    refuses(
        directory,
        f"part-2.safetensors lacks {moved}",
        f"part-0.safetensors holds {moved}, which the index places in part-2.safetensors",
    )
    write_index(directory, {k: v for k, v in index.items() if k != moved})
    refuses(directory, f"part-0.safetensors holds {moved}, which the index does not know")


def test_a_tensor_in_two_shards(copy, no_memory):
    directory, tensors = copy
    index = shard(directory, tensors)
    name = next(name for name, part in index.items() if part == "part-0.safetensors")
    extra = load_file(directory / "part-1.safetensors") | {name: tensors[name]}
    save_file({k: v.clone() for k, v in extra.items()}, directory / "part-1.safetensors")
    refuses(directory, f"part-1.safetensors holds {name}, which the index places in part-0")


def test_a_name_with_and_without_prefix(tmp_path):
    save_file({"p.a": torch.zeros(2), "a": torch.zeros(2)}, tmp_path / FILE)
    with says(CheckpointError, "a is there twice, with and without 'p.'"):
        Checkpoint(tmp_path, "p.")


def test_skipped_tensors_are_listed(tmp_path):
    names = ("p.a", "vision.b", "p.layers.0.rotary_emb.inv_freq")
    save_file({name: torch.zeros(2) for name in names}, tmp_path / FILE)
    checkpoint = Checkpoint(tmp_path, "p.", ("vision.",))
    assert list(checkpoint.shapes) == ["a"] and sorted(checkpoint.skipped) == sorted(names[1:])


def test_what_is_stored_arrives(tmp_path):
    """Dtypes, odd offsets, no elements, no dimensions; with any order of the header's keys."""
    tensors = {
        "bytes": ("U8", [3], b"abc"),
        "a": ("F32", [2, 2], b"\0\0\x80?\0\0\0@\0\0@@\0\0\x80@"),
        "none": ("BF16", [0, 5], b""),
        "one": ("F16", [], b"\0<"),
    }
    entries = dict(reversed(header(tensors).items()))
    (tmp_path / FILE).write_bytes(file(entries, data(tensors)))
    checkpoint = Checkpoint(tmp_path)
    stored = checkpoint.tensors(["a", "none", "one"])
    assert stored["a"].tolist() == [[1, 2], [3, 4]]
    assert stored["none"].shape == (0, 5) and stored["one"].item() == 1
    assert checkpoint.dtypes["bytes"] == "U8"
    del tensors["bytes"]
    (tmp_path / FILE).write_bytes(file(header(tensors), data(tensors)))

    def build(w):
        return w.take_matrix("none", 0, 5), w.take("a", 2, 2), w.take("one")

    none, a, one = load(Checkpoint(tmp_path), build, device="cpu", dtype=torch.float32)
    assert none.shape == (0, 5) and a.tolist() == [[1, 2], [3, 4]] and one.item() == 1
