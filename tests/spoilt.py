"""A small checkpoint of every format, and the ways to spoil it at random."""

import json
import os
import random
import shutil
from pathlib import Path

import torch
from by_hand import data, file, header

INDEX = "model.safetensors.index.json"
DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U8": 1, "F64": 8}
SHARDS = {
    "one.safetensors": {
        "norm": ("BF16", [24]),
        "bias": ("F32", [6]),
        "w.weight_packed": ("I32", [32, 8]),
        "w.weight_scale": ("BF16", [32, 2]),
        "w.weight_shape": ("I32", [2]),
        "bank.0": ("F32", [4, 6]),
    },
    "two.safetensors": {
        "bank.1": ("F32", [4, 6]),
        "half": ("F16", [5, 6]),
        "blocks": ("F8_E4M3", [130, 9]),
        "blocks_scale_inv": ("F32", [2, 1]),
    },
}


def numbers(rng: random.Random, dtype: str, shape: list[int], name: str) -> bytes:
    count = torch.Size(shape).numel()
    if name == "w.weight_shape":
        return (32).to_bytes(4, "little") + (64).to_bytes(4, "little")
    if dtype == "F8_E4M3":
        return bytes(rng.choice([*range(0x7F), *range(0x80, 0xFF)]) for _ in range(count))
    if dtype == "I32":
        return rng.randbytes(4 * count)
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    values = torch.tensor([rng.gauss(0, 1) for _ in range(count)], dtype=kinds[dtype])
    values = values.abs() if name.endswith("_scale_inv") else values
    return values.view(torch.uint8).numpy().tobytes()


class Case:
    """Two shards and their index, as parts that a mutation changes before they are written."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.headers, self.data = {}, {}
        for shard, tensors in SHARDS.items():
            made = {n: (d, list(s), numbers(rng, d, s, n)) for n, (d, s) in tensors.items()}
            self.headers[shard], self.data[shard] = header(made), data(made)
        self.index = {name: shard for shard, tensors in SHARDS.items() for name in tensors}
        self.finish = lambda directory: None  # what happens to the files themselves
        self.shard = rng.choice(list(SHARDS))
        self.name = rng.choice(list(SHARDS[self.shard]))
        self.entry = self.headers[self.shard][self.name]

    def write(self, directory: Path) -> None:
        for shard in SHARDS:
            (directory / shard).write_bytes(file(self.headers[shard], self.data[shard]))
        text = self.index if isinstance(self.index, str) else json.dumps({"weight_map": self.index})
        (directory / INDEX).write_text(text)
        self.finish(directory)


def harmless(case: Case) -> None:
    """Order, blanks, notes, and the place of the data change nothing."""
    entries = list(case.headers[case.shard].items())
    case.rng.shuffle(entries)
    entries.append(("__metadata__", {"format": "pt", "n": str(case.rng.random())}))
    case.headers[case.shard] = json.dumps(dict(entries), indent=case.rng.choice([None, 0, 3]))
    case.headers[case.shard] += " " * case.rng.randrange(20)
    case.index = dict(case.rng.sample(list(case.index.items()), len(case.index)))


def other_size(case: Case) -> None:
    side = case.rng.randrange(len(case.entry["shape"]))
    case.entry["shape"][side] = case.rng.choice([0, 1, -1, 2**31, 2**63, 2**64, 1.5, None, "3"])


def transposed(case: Case) -> None:
    """As many elements in another shape."""
    case.entry["shape"] = case.rng.choice(
        [
            case.entry["shape"][::-1],
            [*case.entry["shape"], 1],
            [torch.Size(case.entry["shape"]).numel()],
        ]
    )


def other_dtype(case: Case) -> None:
    """A word, or another dtype with a shape of as many bytes."""
    dtype = case.rng.choice([*DTYPES, "F4", "BOOL", "", None, 3])
    old = DTYPES[case.entry["dtype"]]
    case.entry["dtype"] = dtype
    if case.rng.random() < 0.5 and dtype in DTYPES:
        case.entry["shape"][-1] = case.entry["shape"][-1] * old // DTYPES[dtype]


def same_width(case: Case) -> None:
    """bfloat16 read as float16 or the other way: legal numbers, other values."""
    pairs = {"BF16": "F16", "F16": "BF16", "F32": "I32", "I32": "F32", "F8_E4M3": "U8"}
    case.entry["dtype"] = pairs[case.entry["dtype"]]


def other_offsets(case: Case) -> None:
    offsets = case.entry["data_offsets"]
    change = case.rng.choice([-8, -4, -1, 1, 4, 8, 10**6, 2**62, -(2**62)])
    for side in case.rng.choice([[0], [1], [0, 1]]):
        offsets[side] += change


def swapped(case: Case) -> None:
    """Two entries trade places: right where they have one size, overlapping where not."""
    entries = case.headers[case.shard]
    other = entries[case.rng.choice(list(entries))]
    a, b = case.entry["data_offsets"], other["data_offsets"]
    case.entry["data_offsets"], other["data_offsets"] = b, a


def entry_damaged(case: Case) -> None:
    key = case.rng.choice([*case.entry, "more"])
    if key in case.entry and case.rng.random() < 0.5:
        del case.entry[key]
    else:
        case.entry[key] = case.rng.choice([None, [], {}, "x", -1, [0], [[0, 1]], True])


def renamed(case: Case) -> None:
    entries = case.headers[case.shard]
    names = ["", "x", case.name + "\0", case.rng.choice(list(case.index)), "__metadata__"]
    entries[case.rng.choice(names)] = entries.pop(case.name)


def copied(case: Case) -> None:
    """A second tensor of the same bytes, or the same name a second time."""
    entries = case.headers[case.shard]
    if case.rng.random() < 0.5:
        entries["x"] = case.entry
    else:
        again = json.dumps({case.name: case.entry})[1:]
        case.headers[case.shard] = json.dumps(entries)[:-1] + ", " + again


def bytes_of(case: Case, low: int, high: int) -> None:
    """Flips up to four bytes of a shard between two places, once it is written."""
    shard, rng = case.shard, case.rng

    def flip(directory: Path) -> None:
        content = bytearray((directory / shard).read_bytes())
        end = min(high, len(content))
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(low, end)] = rng.randrange(256)
        (directory / shard).write_bytes(content)

    case.finish = flip


def length_bytes(case: Case) -> None:
    bytes_of(case, 0, 8)


def header_bytes(case: Case) -> None:
    bytes_of(case, 8, 8 + len(json.dumps(case.headers[case.shard])))


def data_bytes(case: Case) -> None:
    bytes_of(case, 8 + len(json.dumps(case.headers[case.shard])), 10**9)


def other_length(case: Case) -> None:
    """Cut anywhere, or with something behind."""
    shard, rng = case.shard, case.rng

    def resize(directory: Path) -> None:
        size = (directory / shard).stat().st_size
        new = rng.choice([0, 7, 8, rng.randrange(size), size - 1, size + 1, size + 4096])
        os.truncate(directory / shard, new)

    case.finish = resize


def other_file(case: Case) -> None:
    """The shard is gone, a directory, a link, or the other shard."""
    path, rng = case.shard, case.rng

    def replace(directory: Path) -> None:
        (directory / path).unlink()
        kind = rng.randrange(4)
        if kind == 1:
            (directory / path).mkdir()
        elif kind == 2:
            (directory / path).symlink_to(path)
        elif kind == 3:
            shutil.copy(directory / next(s for s in SHARDS if s != path), directory / path)

    case.finish = replace


def index_entry(case: Case) -> None:
    places = [*SHARDS, "../one.safetensors", "/dev/zero", "", ".", "x", INDEX, None, 3, [], {}]
    names = [case.name, "x", ""]
    case.index[case.rng.choice(names)] = case.rng.choice(places)
    if case.rng.random() < 0.2:
        del case.index[case.name]


def index_text(case: Case) -> None:
    """Bytes of the index flipped, cut, or said twice."""
    text = list(json.dumps({"weight_map": case.index}))
    kind = case.rng.randrange(3)
    if kind == 0:
        text[case.rng.randrange(len(text))] = chr(case.rng.randrange(32, 127))
    elif kind == 1:
        del text[case.rng.randrange(len(text)) :]
    else:
        text[-2:] = f', "{case.name}": "{case.rng.choice(list(SHARDS))}"}}}}'
    case.index = "".join(text)


MUTATIONS = [
    harmless, other_size, transposed, other_dtype, same_width, other_offsets, swapped,
    entry_damaged, renamed, copied, length_bytes, header_bytes, data_bytes, other_length,
    other_file, index_entry, index_text,
]  # fmt: skip
