"""Strict loading: whatever is wrong with a checkpoint is said, all of it, before it is used."""

import json
import os
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
from kdtree.weights.header import LIMIT

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


def test_check_says_the_same(copy):
    directory, tensors = copy
    tensors["a"] = torch.zeros(2)
    save_file(tensors, directory / FILE)
    problems = check(Checkpoint(directory), lambda w: w.take("b", 3), dtype=torch.float32)
    assert problems[0] == "b is missing" and problems[1] == "a is not used by the model"
    assert len(problems) == 2 + len(tensors) - 1


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


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is no weight index"),
        ("[]", "it has no object weight_map"),
        ('{"weight_map": ["a"]}', "it has no object weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "holds a twice"),
        ('{"weight_map": {"a": NaN}}', "NaN is no JSON"),
        ('{"weight_map": {"a": 3}}', "places a in 3, wants a file beside it"),
        ('{"weight_map": {"a": ["x"]}}', "places a in ['x'], wants"),
        *(
            (json.dumps({"weight_map": {"a": name}}), f"places a in {name!a}, wants a file beside")
            for name in ("../x", "/etc/passwd", "b/c", "..", ".", "", "x\0", "\x1b[2J", "\udc80")
        ),
        ("[" * 100000, "it is nested too deeply"),
    ],
)
def test_broken_index(tmp_path, text, message):
    (tmp_path / INDEX).write_text(text)
    with says(CheckpointError, message):
        Checkpoint(tmp_path)


def test_giant_index(tmp_path):
    (tmp_path / INDEX).touch()
    os.truncate(tmp_path / INDEX, 1 << 40)
    with says(CheckpointError, f"it has {1 << 40} bytes, wants at most {LIMIT}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("others", [[], ["pytorch_model.bin", "model-1.safetensors"]])
def test_no_weights(tmp_path, others):
    for name in others:
        (tmp_path / name).touch()
    seen = ", ".join(sorted(others)) or "no other weights"
    with says(CheckpointError, f"it holds neither {INDEX} nor {FILE}, but {seen}"):
        Checkpoint(tmp_path)


TENSORS = {
    "a": ("F32", [2, 3], bytes(24)),
    "b": ("BF16", [4], bytes(8)),
    "c": ("I32", [2], bytes(8)),
}


def entry(name, **changes):
    """The header with another entry."""
    entries = header(TENSORS)
    entries[name] = entries[name] | changes
    return entries


WRONG = [
    (entry("b", data_offsets=[20, 28]), ["b begins 4 bytes before a ends", "c leaves a gap of 4"]),
    ({k: v for k, v in header(TENSORS).items() if k != "b"}, ["c leaves a gap of 8 bytes after a"]),
    ({k: v for k, v in header(TENSORS).items() if k != "a"}, ["b leaves a gap of 24 bytes before"]),
    ({k: v for k, v in header(TENSORS).items() if k != "c"}, ["has 8 bytes beyond its last"]),
    (entry("c", data_offsets=[32, 48], shape=[4]), ["is truncated: it has ", ", wants "]),
    (entry("a", shape=[2, 4]), ["a has 24 bytes, wants 32 for F32 [2, 4]"]),
    (entry("a", shape=[2, 2**62]), ["a has 24 bytes, wants 36893488147419103232 for F32"]),
    (entry("a", dtype="F64"), ["a has 24 bytes, wants 48 for F64 [2, 3]"]),
    (entry("a", dtype="Q4") | {"b": 3}, ["a has dtype 'Q4', wants one of BOOL", "b has no dtype"]),
    (entry("a", dtype=["F32"]), ["a has dtype ['F32'], wants one of BOOL"]),
    (entry("a", shape=[-2, -3]), ["a has shape [-2, -3], wants"]),
    (entry("a", shape=[2.0, 3]), ["a has shape [2.0, 3], wants"]),
    (entry("a", shape=[True, 6]), ["a has shape [True, 6], wants"]),
    (entry("a", shape=6), ["a has shape 6, wants"]),
    (entry("a", shape=[2, 3] + [1] * 15), ["wants at most 16 sizes"]),
    (entry("a", data_offsets=[24, 0]), ["a has -24 bytes, wants 24"]),
    (entry("a", data_offsets=[0, 24, 24]), ["a has data_offsets [0, 24, 24], wants a begin and"]),
    (entry("a", more=1), ["a has no dtype, shape and data_offsets"]),
    (header(TENSORS) | {"\x1b[2J": header(TENSORS)["a"]}, ["'\\x1b[2J' is no name that can be"]),
    (header(TENSORS) | {"__metadata__": {"x": 1}}, ["__metadata__ is no object of strings"]),
    (json.dumps(header(TENSORS))[:-1] + ', "a": 1, "c": 2}', ["holds a twice", "holds c twice"]),
    ("[]", ["is no safetensors file: its header is no JSON object"]),
    (" " + json.dumps(header(TENSORS)), ["its header is no JSON object"]),
    ("{", ["is no safetensors file"]),
    (b'{"\xff": 1}', ["is no safetensors file"]),
    ("[" * 100000, ["it is nested too deeply"]),
    ('{"a": Infinity}', ["Infinity is no JSON"]),
]


@pytest.mark.parametrize("text, messages", WRONG, ids=lambda x: str(x)[:40])
def test_broken_header(tmp_path, text, messages):
    (tmp_path / FILE).write_bytes(file(text, data(TENSORS)))
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    assert all(FILE in str(error.value) and part in str(error.value) for part in messages)


@pytest.mark.parametrize("cut", [1, 7, 8, 40, 200, -1, -30])
def test_truncated(tmp_path, cut):
    whole = file(header(TENSORS), data(TENSORS))
    (tmp_path / FILE).write_bytes(whole[:cut])
    with says(CheckpointError, f"is truncated: it has {len(whole[:cut])} bytes, wants"):
        Checkpoint(tmp_path)


def test_header_length_is_not_believed(tmp_path):
    (tmp_path / FILE).write_bytes(file(header(TENSORS), data(TENSORS), length=2**63))
    with says(CheckpointError, f"wants a header of {2**63} bytes"):
        Checkpoint(tmp_path)
    (tmp_path / FILE).write_bytes(file(header(TENSORS), data(TENSORS), length=1 << 39))
    os.truncate(tmp_path / FILE, 1 << 40)
    with says(CheckpointError, f"has a header of {1 << 39} bytes, wants at most {LIMIT}"):
        Checkpoint(tmp_path)


def test_a_shard_that_is_no_file(tmp_path):
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "p")
    (tmp_path / "l").symlink_to("l")
    write_index(tmp_path, {"a": "d", "b": "p", "c": "l", "e": "x" * 300})
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path)
    assert all(f"\n  {name} is" in str(error.value) for name in ("d", "p", "l", "x" * 300))


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
