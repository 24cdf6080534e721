"""The benchmark of loading at a small size: it runs, checks itself, and counts bytes."""

import json
import sys
from pathlib import Path

import pytest

from kdtree.cli import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import bench_load  # noqa: E402
import harness  # noqa: E402


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_load, "SHAPE", (64, 96))
    monkeypatch.setattr(bench_load, "MATRICES", 3)
    monkeypatch.setattr(bench_load, "HEADER_SHARDS", 2)
    monkeypatch.setattr(bench_load, "LAYERS", 1)
    monkeypatch.setattr(bench_load, "EXPERTS", 4)
    monkeypatch.setattr(harness, "peaks", lambda device: machine.Peaks(4e12, 8e14))
    flags = f"bench_load.py --device cpu --repeat 2 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", flags.split())
    return tmp_path


def test_rows(small):
    bench_load.main()
    headers, *rows = json.loads((small / "load_cpu.json").read_text())["rows"]
    assert headers["tensors"] == 4 * 3 * 3 and headers["files"] == 2
    assert [row["what"] for row in rows] == ["read", "place"]
    stored = bench_load.SHARDS * 3 * 2 * (64 * 96 + 96)
    for row in rows:
        assert stored < row["bytes"] < 1.2 * stored
        assert min(row["library_s"], row["ours_s"], row["ratio"]) > 0


def test_a_wrong_value_is_no_row(small, monkeypatch):
    right = bench_load.ours_place

    def wrong(directory):
        tensors = right(directory)
        tensors[-1][0] += 1
        return tensors

    monkeypatch.setattr(bench_load, "ours_place", wrong)
    with pytest.raises(AssertionError):
        bench_load.main()
