"""Reading ahead: the right bytes, bounded memory, and an end that leaves nothing behind."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from alarm import within
from safetensors.torch import save_file
from says import says

from kdtree import CheckpointError
from kdtree.weights import Checkpoint, Reading, load, loader, memory, reader
from kdtree.weights.memory import Request
from kdtree.weights.reader import Reader

SMALL = Reading(threads=3, piece=64, ring=256)


def tensors(count: int, rows: int = 7) -> dict[str, torch.Tensor]:
    """Of different sizes, most of them several pieces."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{i}": torch.randn(rows + i % 5, 9, generator=generator) for i in range(count)}


@pytest.fixture(autouse=True)
def no_hang():
    with within(60):
        yield


@pytest.fixture
def checkpoint(tmp_path) -> Checkpoint:
    save_file(tensors(30), tmp_path / "model.safetensors")
    return Checkpoint(tmp_path)


def take(checkpoint, w):
    return [w.take(name, *checkpoint.shapes[name]) for name in tensors(30)]


@pytest.mark.parametrize(
    "reading", [SMALL, Reading(1, 8, 8), Reading(8, 1 << 20, 1 << 20), Reading()], ids=str
)
def test_every_tensor_arrives(checkpoint, reading, device):
    got = load(
        checkpoint,
        lambda w: take(checkpoint, w),
        device=device,
        dtype=torch.float32,
        reading=reading,
    )
    for tensor, want in zip(got, tensors(30).values(), strict=True):
        assert torch.equal(tensor.cpu(), want)


def test_reads_may_be_short(checkpoint, monkeypatch):
    """As a network's file system may answer, in the middle of a number."""
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: whole(file, [parts[0][:5]], at))
    how = {"device": "cpu", "dtype": torch.float32, "reading": SMALL}
    got = load(checkpoint, lambda w: take(checkpoint, w), **how)
    for tensor, want in zip(got, tensors(30).values(), strict=True):
        assert torch.equal(tensor, want)


def test_a_reused_buffer_spoils_nothing(checkpoint, device):
    """Every other tensor is converted, out of memory that is used again."""
    wants = list(tensors(30).values())
    dtypes = [(torch.bfloat16, torch.float32)[i % 2] for i in range(30)]

    def build(w):
        each = zip(tensors(30), wants, dtypes, strict=True)
        return [w.take(name, *want.shape, dtype=dtype) for name, want, dtype in each]

    got = load(checkpoint, build, device=device, dtype=torch.float32, reading=SMALL)
    for tensor, want, dtype in zip(got, wants, dtypes, strict=True):
        assert torch.equal(tensor.cpu(), want.to(dtype))


def test_a_bank_is_read_as_one(tmp_path, device):
    """Wider than the ring, side by side, in the order that is asked for."""
    parts = {f"t{i}": torch.randn(16, 16) for i in range(12)}
    save_file(parts, tmp_path / "model.safetensors")
    order = sorted(parts, key=lambda name: name[::-1])
    bank = load(
        Checkpoint(tmp_path),
        lambda w: w.take_bank(order, 16, 16),
        device=device,
        dtype=torch.float32,
        reading=SMALL,
    )
    assert torch.equal(bank.cpu(), torch.stack([parts[name] for name in order]))


def test_a_cpu_tensor_is_where_it_was_read(checkpoint, monkeypatch):
    """No copy: what threads wrote to is what the model keeps."""
    read = set()

    class Spy(Reader):
        def take(self, request):
            memory = super().take(request)
            read.add(memory.data_ptr())
            return memory

    monkeypatch.setattr(loader, "Reader", Spy)
    how = {"device": "cpu", "dtype": torch.float32, "reading": SMALL}
    kept = load(checkpoint, lambda w: take(checkpoint, w), **how)
    assert {tensor.data_ptr() for tensor in kept} == read and len(read) == 30


class Event:
    """A copy's event; a buffer must not be filled before its last copy is over."""

    def __init__(self):
        self.pending = False

    def record(self, stream):
        assert not self.pending, "a buffer was used again while it was copied from"
        self.pending = True

    def synchronize(self):
        self.pending = False


def test_the_ring_of_buffers(checkpoint, monkeypatch):
    """What is done for a CUDA device, without one: more pieces than buffers, each waited for."""
    rings = []

    def ring_of_four(ring):
        rings.append(memory.Pinned(ring, SMALL.piece, torch.device("cpu")))
        return rings[-1]

    monkeypatch.setattr(memory, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(reader, "Host", ring_of_four)
    how = {"device": "cpu", "dtype": torch.float32, "reading": SMALL}
    got = load(checkpoint, lambda w: take(checkpoint, w), **how)
    for tensor, want in zip(got, tensors(30).values(), strict=True):
        assert torch.equal(tensor, want)
    assert len(rings[0].free) == SMALL.ring // SMALL.piece
    assert len({buffer.data_ptr() for buffer, _ in rings[0].free}) == len(rings[0].free)


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_no_more_than_the_ring_is_ahead(checkpoint):
    requests = [Request((name,)) for name in tensors(30)]
    with Reader(checkpoint, requests, torch.device("cpu"), SMALL) as own:
        for request in requests:
            until(lambda: not own._next or not own._memory.has_room(own._next))
            assert own._memory.ahead <= SMALL.ring
            own.take(request)
        assert own._memory.ahead == 0


PEAK = """
import sys, torch
from kdtree.weights import Checkpoint, Reading, load, loader, memory, reader
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) // 1024
checkpoint, dtype = Checkpoint(sys.argv[1]), getattr(torch, sys.argv[2])
def build(w):
    for name, shape in checkpoint.shapes.items():
        w.take(name, *shape, dtype=dtype)  # and dropped
torch.zeros(8 << 20).bfloat16()
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = status("VmRSS")
reading = Reading(threads=2, piece=1 << 20, ring=16 << 20)
load(checkpoint, build, device="cpu", dtype=dtype, reading=reading)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_memory(tmp_path, dtype):
    """384 MB pass through a ring of 16 MB: twice that, what is converted, and the allocator's."""
    for i in range(4):
        names = [f"t{i}.{j}" for j in range(24)]
        save_file(
            {name: torch.zeros(2 << 20, dtype=torch.bfloat16) for name in names},
            tmp_path / f"m{i}.safetensors",
        )
    where = {f"t{i}.{j}": f"m{i}.safetensors" for i in range(4) for j in range(24)}
    index = str({"weight_map": where}).replace("'", '"')
    (tmp_path / "model.safetensors.index.json").write_text(index)
    command = [sys.executable, "-c", PEAK, str(tmp_path), dtype]
    root = Path(__file__).parent.parent
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert 0 < int(result.stdout) < 2 * 16 + 2 * 8 + 32


def left_behind() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.fixture
def nothing_left():
    before = left_behind()
    yield
    assert left_behind() == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("change", ["cut", "gone", "directory"])
def test_a_file_that_changes_meanwhile(checkpoint, change):
    path = checkpoint.directory / "model.safetensors"
    if change == "cut":
        os.truncate(path, path.stat().st_size - 300)
        message = "model.safetensors, at t9: it is truncated"
    else:
        path.unlink()
        message = "model.safetensors: "
    if change == "directory":
        path.mkdir()
        message = "model.safetensors, at t"
    with says(CheckpointError, message):
        load(
            checkpoint,
            lambda w: take(checkpoint, w),
            device="cpu",
            dtype=torch.float32,
            reading=SMALL,
        )


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_constructor_that_fails_midway(checkpoint, error):
    def build(w):
        some = take(checkpoint, w)
        if w.device.type != "meta":
            raise error("stop")
        return some

    def build_less(w):
        if w.device.type != "meta":
            w.take("t0", *checkpoint.shapes["t0"])
            raise error("stop")
        return take(checkpoint, w)

    for constructor in (build, build_less):
        with says(error, "stop"):
            load(checkpoint, constructor, device="cpu", dtype=torch.float32, reading=SMALL)


@pytest.mark.usefixtures("nothing_left")
def test_a_reader_that_is_left_unread(checkpoint):
    requests = [Request((name,)) for name in tensors(30)]
    for reading in (SMALL, Reading()):
        with Reader(checkpoint, requests, torch.device("cpu"), reading):
            pass


@pytest.mark.usefixtures("nothing_left")
def test_an_error_in_a_thread_is_the_caller_s(checkpoint, monkeypatch):
    def broken(*arguments):
        raise MemoryError("none left")

    monkeypatch.setattr("kdtree.weights.reader.fault", broken)
    with says(MemoryError, "none left"):
        load(checkpoint, lambda w: take(checkpoint, w), device="cpu", dtype=torch.float32)


def test_progress_counts_bytes(checkpoint):
    seen = []
    total = sum(4 * t.numel() for t in tensors(30).values())
    load(
        checkpoint,
        lambda w: take(checkpoint, w),
        device="cpu",
        dtype=torch.float32,
        reading=SMALL,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (total, total) and {n for _, n in seen} == {total}
    steps = [b - a for (a, _), (b, _) in zip([(0, 0), *seen], seen, strict=False)]
    assert all(0 < step <= SMALL.piece for step in steps)


@pytest.mark.parametrize("wrong", [(0, 8, 8), (1, 0, 8), (1, 12, 24), (1, 16, 8)])
def test_reading_makes_sense(wrong):
    with says(ValueError, "wants threads and piece, a multiple of 8, within the ring"):
        Reading(*wrong)
