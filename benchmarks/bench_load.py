"""Times the loading of a 4 GB bfloat16 checkpoint beside safetensors' own, files in the page cache.

Rows of kind "load", each the median of --repeat runs that alternate with the library's:

    read     every byte of every tensor read once. Library: load_file, and a maximum over each
             tensor as 64-bit integers, the cheapest full read found. Ours: every tensor delivered,
             in buffers that are used again, each number checked to be finite.
    place    every tensor in memory of its own, as a model keeps it. Library: load_file, which maps
             pages, and a copy of each tensor. Ours: read to where it stays, and checked.
    device   on CUDA: every tensor on the device. Library: load_file(device=...). Ours: by way of
             pinned buffers, and checked.

cpu_s counts the seconds of all threads: where other programs have the cores, it is disturbed least.
The row of kind "headers" is what names and shapes cost at the size of Kimi-K2.6: files without
data, 64 shards of 208,000 tensors in all, opened and planned.
"""

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import harness
import torch
from safetensors.torch import load_file, save_file

from kdtree.weights import Checkpoint, Reading, check, load
from kdtree.weights.memory import Request
from kdtree.weights.reader import Reader

INDEX = "model.safetensors.index.json"
SHAPE = 2048, 7168  # an expert's matrix of Kimi-K2.6
SHARDS, MATRICES = 4, 36  # of 29 MB each, and one norm beside each: 4.2 GB
HEADER_SHARDS, LAYERS, EXPERTS = 64, 60, 384


def write_checkpoint(directory: Path) -> None:
    where = {}
    for shard in range(SHARDS):
        file, tensors = f"model-{shard}.safetensors", {}
        matrix, norm = torch.randn(SHAPE).bfloat16(), torch.ones(SHAPE[1]).bfloat16()
        for i in range(MATRICES):
            tensors[f"layers.{shard}.{i}.weight"] = matrix.clone()
            tensors[f"layers.{shard}.{i}.norm"] = norm.clone()
        save_file(tensors, directory / file)
        where |= dict.fromkeys(tensors, file)
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))


def library_read(directory: Path) -> None:
    for path in sorted(directory.glob("*.safetensors")):
        for tensor in load_file(path).values():
            tensor.view(-1).view(torch.int64).numpy().max()


def library_place(directory: Path) -> list[torch.Tensor]:
    paths = sorted(directory.glob("*.safetensors"))
    return [tensor.clone() for path in paths for tensor in load_file(path).values()]


def library_device(directory: Path) -> list[torch.Tensor]:
    paths = sorted(directory.glob("*.safetensors"))
    kept = [tensor for path in paths for tensor in load_file(path, device="cuda").values()]
    torch.cuda.synchronize()
    return kept


def ours_read(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    requests = [Request((name,), borrowed=True) for name in checkpoint.entries]
    with Reader(checkpoint, requests, torch.device("cpu"), Reading()) as reader:
        for request in requests:
            reader.give_back(reader.take(request))
        assert not reader.faults


def ours_place(directory: Path, device: str = "cpu") -> list[torch.Tensor]:
    checkpoint = Checkpoint(directory)

    def build(w):
        return [w.take(name, *shape) for name, shape in checkpoint.shapes.items()]

    return load(checkpoint, build, device=device, dtype=torch.bfloat16)


def ours_device(directory: Path) -> list[torch.Tensor]:
    kept = ours_place(directory, "cuda")
    torch.cuda.synchronize()
    return kept


def timed(call: Callable[[Path], object], directory: Path) -> tuple[float, float]:
    """Seconds by the clock, and of all threads together; what was loaded is freed outside both.

    Memory that malloc keeps is given back first: a program loads once, into fresh memory.
    """
    ctypes.CDLL(None).malloc_trim(0)
    clock, cpu = time.perf_counter(), time.process_time()
    kept = call(directory)
    seconds = time.perf_counter() - clock, time.process_time() - cpu
    del kept
    return seconds


def compare(what: str, library, ours, directory: Path, repeat: int) -> dict:
    theirs, own = [], []
    for _ in range(repeat):
        theirs.append(timed(library, directory))
        own.append(timed(ours, directory))
    medians = [statistics.median(x) for side in (theirs, own) for x in zip(*side, strict=True)]
    library_s, library_cpu_s, ours_s, ours_cpu_s = medians
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    return {
        "kind": "load",
        "what": what,
        "bytes": size,
        "library_s": library_s,
        "ours_s": ours_s,
        "ratio": library_s / ours_s,
        "library_cpu_s": library_cpu_s,
        "ours_cpu_s": ours_cpu_s,
        "gb_per_s": size / ours_s / 1e9,
    }


def same_values(directory: Path) -> None:
    """Asserted before anything is timed."""
    checkpoint = Checkpoint(directory)
    ours = dict(zip(checkpoint.shapes, ours_place(directory), strict=True))
    for path in directory.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            assert torch.equal(ours.pop(name), tensor)
    assert not ours


def write_headers(directory: Path) -> None:
    """Shards of Kimi-K2.6's size whose data are holes."""
    kinds = (("packed", "I32", 8, 4), ("scale", "BF16", 32, 2))
    shards = [{} for _ in range(HEADER_SHARDS)]
    ends = [0] * HEADER_SHARDS
    names = [
        (layer, expert, p) for layer in range(LAYERS) for expert in range(EXPERTS) for p in range(3)
    ]
    for i, (layer, expert, p) in enumerate(names):
        shard = i * HEADER_SHARDS // len(names)
        out, features = SHAPE if p < 2 else SHAPE[::-1]
        sizes = [
            (k, d, [out, features // per], out * features // per * n) for k, d, per, n in kinds
        ]
        for kind, dtype, shape, size in [*sizes, ("shape", "I32", [2], 8)]:
            offsets = [ends[shard], ends[shard] + size]
            ends[shard] = offsets[1]
            name = f"{layer}.{expert}.{p}.weight_{kind}"
            shards[shard][name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    where = {}
    for number, (tensors, end) in enumerate(zip(shards, ends, strict=True)):
        path, text = directory / f"model-{number}.safetensors", json.dumps(tensors).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + end)
        where |= dict.fromkeys(tensors, path.name)
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))


def time_headers(directory: Path) -> dict:
    def build(w):
        for layer in range(LAYERS):
            each = range(EXPERTS)
            w.at(layer).take_int4_bank([f"{e}.{p}" for e in each for p in range(2)], *SHAPE)
            w.at(layer).take_int4_bank([f"{e}.2" for e in each], *SHAPE[::-1])

    start = time.perf_counter()
    checkpoint = Checkpoint(directory)
    opened = time.perf_counter()
    problems = check(checkpoint, build, dtype=torch.bfloat16)
    planned = time.perf_counter()
    assert len(problems) == LAYERS * EXPERTS * 3  # the stored shapes are holes too, and noticed
    return {
        "kind": "headers",
        "tensors": len(checkpoint.entries),
        "files": HEADER_SHARDS,
        "open_s": opened - start,
        "plan_s": planned - opened,
    }


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder for 4.2 GB of files (default: /tmp)")
    arguments = parser.parse_args()
    peaks = harness.peaks(arguments.device)
    pairs = [("read", library_read, ours_read), ("place", library_place, ours_place)]
    if arguments.device.type == "cuda":
        pairs.append(("device", library_device, ours_device))
    with TemporaryDirectory(dir=arguments.scratch) as folder:
        write_headers(Path(folder))
        rows = [time_headers(Path(folder))]
    with TemporaryDirectory(dir=arguments.scratch) as folder:
        write_checkpoint(Path(folder))
        os.sync()
        same_values(Path(folder))
        rows += [compare(*pair, Path(folder), arguments.repeat) for pair in pairs]
    facts = harness.header(arguments.device, peaks, arguments.commit)
    harness.write(f"load_{arguments.device.type}", rows, facts, arguments.out)


if __name__ == "__main__":
    main()
