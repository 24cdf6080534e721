"""Headers and indexes by hand: each offence is refused, with its tensor, before memory is taken."""

import json
import os

import pytest
from by_hand import data, file, header
from says import says

from kdtree import CheckpointError
from kdtree.weights import Checkpoint
from kdtree.weights.header import LIMIT

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_index(directory, index):
    (directory / INDEX).write_text(json.dumps({"weight_map": index}))


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
    seen = f", but {', '.join(sorted(others))}" if others else " nor other weights"
    with says(CheckpointError, f"it holds neither {INDEX} nor {FILE}{seen}"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", [INDEX, FILE])
@pytest.mark.parametrize("kind", ["folder", "loop", "pipe", "device"])
def test_no_regular_file(tmp_path, name, kind):
    path = tmp_path / name
    make = {
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()
    with says(CheckpointError, name):
        Checkpoint(tmp_path)
    with says(CheckpointError, "no regular file" if kind != "loop" else name):
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
