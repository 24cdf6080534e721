"""Tensors that are no part of the text model: skipped by rule, and said to be."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from says import says
from variants import variant

from kdtree import CheckpointError
from kdtree.models import load_model

FILE = "model.safetensors"


@pytest.fixture
def copy(tmp_path):
    """A model directory to add to, and its tensors."""
    shutil.copytree(variant("base"), tmp_path / "model")
    return tmp_path / "model", load_file(tmp_path / "model" / FILE)


def with_prediction_layers(tensors: dict, ids: list[int]) -> dict:
    """The tensors, and copies of layer 1 with what a multi-token prediction layer has besides."""
    layer = {k.removeprefix("model.layers.1."): v for k, v in tensors.items() if ".layers.1." in k}
    own = {
        "eh_proj.weight": torch.ones(256, 512),
        "enorm.weight": torch.ones(256),
        "hnorm.weight": torch.ones(256),
        "shared_head.norm.weight": torch.ones(256),
    }
    own = {name: tensor.bfloat16() for name, tensor in own.items()}
    return tensors | {
        f"model.layers.{i}.{k}": v.clone() for i in ids for k, v in (layer | own).items()
    }


def write(directory, tensors, layers=None):
    save_file(tensors, directory / FILE)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if layers is not None:
        config["num_nextn_predict_layers"] = layers
    path.write_text(json.dumps(config))


def state(directory):
    return load_model(directory, device="cpu", dtype=torch.float32).state_dict()


@pytest.mark.parametrize("counted, stored", [(1, [4]), (2, [4, 5]), (0, [4]), (3, [4])])
def test_prediction_layers(copy, caplog, counted, stored):
    """Also where the config counts none of them, or more than there are."""
    directory, tensors = copy
    plain = state(directory)
    assert not caplog.records
    write(directory, with_prediction_layers(tensors, stored), counted)
    got = state(directory)
    assert got.keys() == plain.keys() and all(torch.equal(got[k], plain[k]) for k in got)
    count = len(with_prediction_layers(tensors, [9])) - len(tensors)
    assert [record.getMessage() for record in caplog.records] == [
        f"skipped model.layers.{i}.* (multi-token prediction), tensors: {count}" for i in stored
    ]


def test_more_prediction_layers_than_counted(copy):
    directory, tensors = copy
    write(directory, with_prediction_layers(tensors, [4, 5]), 1)
    with says(CheckpointError, "model.layers.5.eh_proj.weight is not used by the model"):
        state(directory)


def test_a_layer_too_many_is_no_prediction_layer(copy):
    directory, tensors = copy
    tensors = with_prediction_layers(tensors, [4])
    del tensors["model.layers.4.eh_proj.weight"]
    write(directory, tensors)
    with says(CheckpointError, "model.layers.4.*", "num_hidden_layers = 4", "eh_proj.weight"):
        state(directory)


def test_images(caplog):
    """Of a wrapped model: its vision tower and projector, nothing else."""
    state(variant("kimi"))
    assert [record.getMessage() for record in caplog.records] == [
        "skipped vision_tower.* (images), tensors: 1",
        "skipped mm_projector.* (images), tensors: 1",
    ]


def test_tensors_without_the_wrapper_s_prefix_are_not_images(tmp_path):
    shutil.copytree(variant("kimi"), tmp_path / "model")
    index = tmp_path / "model/model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"]["mm_projector.linear_1.weight"]
    tensors = load_file(tmp_path / "model" / file)
    tensors["audio_tower.weight"] = tensors.pop("mm_projector.linear_1.weight")
    save_file(tensors, tmp_path / "model" / file)
    content["weight_map"]["audio_tower.weight"] = content["weight_map"].pop(
        "mm_projector.linear_1.weight"
    )
    index.write_text(json.dumps(content))
    with says(CheckpointError, "audio_tower.weight is not used by the model"):
        state(tmp_path / "model")
