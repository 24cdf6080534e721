"""Strict loading: whatever is wrong with a checkpoint is said, all of it, before it is used."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from variants import variant

from kdtree import CheckpointError
from kdtree.models import load_model

FILE = "model.safetensors"


@pytest.fixture
def copy(tmp_path):
    """A model directory to spoil, and its tensors."""
    shutil.copytree(variant("int4"), tmp_path / "model")
    return tmp_path / "model", load_file(tmp_path / "model" / FILE)


def load(directory):
    return load_model(directory, device="cpu", dtype=torch.float32)


def refuses(directory, *messages):
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for message in messages:
        assert message in str(error.value)


def test_names_every_offender(copy):
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
        packed.removesuffix("_packed"),
    )


def test_wrong_dtype(copy):
    directory, tensors = copy
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()
    save_file(tensors, directory / FILE)
    refuses(directory, "model.norm.weight has dtype int32, wants float32, bfloat16, float16")


def test_weight_shape_disagrees(copy):
    directory, tensors = copy
    name = next(name for name in tensors if name.endswith("weight_shape"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, directory / FILE)
    refuses(directory, f"{name} is")


@pytest.mark.parametrize("cut", [4, 100, 5000])
def test_truncated(copy, cut):
    directory, _ = copy
    data = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(data[:-cut] if cut > 4 else data[:cut])
    refuses(directory, f"{FILE} is not a whole safetensors file")


def shard(directory, tensors):
    names = sorted(tensors)
    parts = {f"part-{i}.safetensors": names[i::3] for i in range(3)}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    index = {name: file for file, own in parts.items() for name in own}
    write_index(directory, index)
    return index


def write_index(directory, index):
    text = json.dumps({"weight_map": index})
    (directory / "model.safetensors.index.json").write_text(text)


def test_shards_load_alike(copy):
    directory, tensors = copy
    whole = load(directory).state_dict()
    (directory / FILE).unlink()
    shard(directory, tensors)
    parts = load(directory).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_missing_shard_and_wrong_index(copy):
    directory, tensors = copy
    index = shard(directory, tensors)
    (directory / "part-1.safetensors").unlink()
    refuses(directory, "part-1.safetensors is missing")
    index = shard(directory, tensors)
    moved = next(name for name, file in index.items() if file == "part-0.safetensors")
    write_index(directory, index | {moved: "part-2.safetensors"})
    refuses(directory, f"part-2.safetensors lacks {moved}", f"part-0.safetensors holds {moved}")
    write_index(directory, {k: v for k, v in index.items() if k != moved})
    refuses(directory, f"part-0.safetensors holds {moved}, which the index does not know")


def test_no_weights(copy):
    directory, _ = copy
    (directory / FILE).unlink()
    refuses(directory, "holds neither model.safetensors.index.json nor model.safetensors")
