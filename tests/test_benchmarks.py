"""The benchmarks' own parts, and each op's rows at small sizes: they are checked, not timed."""

import json
import sys
from pathlib import Path

import pytest
import torch
from fake_engine import FakeEngine

from kdtree import ops
from kdtree.cli import machine

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_engine  # noqa: E402
import bench_ops  # noqa: E402
import bench_round  # noqa: E402
import cases  # noqa: E402
import cases_experts  # noqa: E402
import eager  # noqa: E402
import harness  # noqa: E402
import tables  # noqa: E402

CPU = torch.device("cpu")
PEAKS = machine.Peaks(bandwidth=4e12, peak=8e14)


def test_the_clock_counts_one_call(device):
    x = torch.ones(1 << 20, device=device)
    calls = []

    def call():
        calls.append(1)
        return x + 1

    assert 0 < harness.time(call, device) < 1e6
    assert len(calls) > 1


def test_floor_is_the_slower_of_both():
    assert harness.floor(4e6, 0, PEAKS) == pytest.approx(1)
    assert harness.floor(4e6, 8e9, PEAKS) == pytest.approx(10)


def test_peaks_are_plausible(device):
    measured = harness.peaks(device)
    assert 1e8 < measured.bandwidth < 2e13 and 1e8 < measured.peak < 1e16


def test_results_file(device, tmp_path, capsys):
    facts = harness.header(device, PEAKS, "abc")
    row = {"op": "o", "shape": {"T": 3}, "dtype": "float32", "us": 2.0, "floor_us": 1.0}
    other = {"kind": "k", "phases_ms": {"draft": 0.5}, "n": None}
    path = harness.write("name", [row, other], facts, tmp_path)
    results = json.loads(path.read_text())
    assert list(results) == [
        "card", "clocks", "driver", "date", "commit", "torch", "bandwidth", "peak", "rows",
    ]  # fmt: skip
    assert results["rows"] == [row, other] and results["commit"] == "abc"
    out = capsys.readouterr().out
    assert "T=3" in out and "50%" in out and "draft=0.5" in out and "4000 GB/s" in out


def test_every_op_has_its_rows():
    assert sorted(bench.__name__ for bench in bench_ops.BENCHES) == sorted(ops.__all__)


@pytest.mark.parametrize("bench", bench_ops.BENCHES, ids=lambda bench: bench.__name__)
def test_rows(bench, monkeypatch):
    """Each call and its baseline run, after the check that the row makes itself."""

    def once(call, device):
        call()
        return 1.0

    monkeypatch.setattr(harness, "time", once)
    torch.manual_seed(0)
    rows = list(bench_ops.rows(bench, cases.Bench(CPU), PEAKS))
    assert rows
    for row in rows:
        assert row["op"] == bench.__name__ and row["floor_us"] > 0
        assert all(isinstance(n, int | float) for n in row["shape"].values())
    if bench.__name__ == "tree_build":
        assert {"B": 1, "N": 64, "J": 15, "M": 16} in [row["shape"] for row in rows]


def test_a_wrong_result_is_no_row(monkeypatch):
    monkeypatch.setattr(ops, "swiglu", lambda x: eager.swiglu(x) * 1.001)
    with pytest.raises(AssertionError, match="swiglu: relative error 0.001"):
        next(bench_ops.swiglu(cases.Bench(CPU)))


def test_operands_turn():
    seen = []
    call = cases.turning(lambda a, b: seen.append((a, b)), [1, 2], [3, 4, 5])
    for _ in range(4):
        call()
    assert seen == [(1, 3), (2, 4), (1, 5), (2, 3)]


@pytest.mark.parametrize(
    "T, E, K, apart", [(1, 384, 8, 6), (5, 24, 4, 3), (3, 24, 4, 99), (9, 8, 8, 1)]
)
def test_experts_turn(T, E, K, apart):
    """No expert is in two of `apart` sets in a row, the last and the first included."""
    sets = cases_experts.expert_sets(T, E, K, apart, CPU)
    apart = min(apart, E // K)
    assert len(sets) >= 8 and len(sets) % apart == 0
    for i, ids in enumerate(sets):
        assert ids.shape == (T, K) and ids.dtype == torch.int32
        assert all(len(set(row)) == K for row in ids.tolist())
        near = [sets[(i + n) % len(sets)] for n in range(apart)]
        assert len(torch.cat(near).unique()) == sum(len(each.unique()) for each in near)
    used = torch.cat(sets).unique()
    assert 0 <= used[0] and used[-1] < E


def test_int4_codes_become_weights():
    """Low nibble first, a code is its value + 8, a scale serves 32 inputs."""
    codes = torch.tensor([[0x76543210, 0, 0, -1, 0, 0, 0, 8]], dtype=torch.int32)
    scale = torch.tensor([[1.0, 0.5]])
    w = eager.int4_weights(codes, scale)[0]
    assert w.shape == (64,)
    assert w[:8].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert w[24:32].tolist() == [7] * 8
    assert w[32:40].tolist() == [-4] * 8 and w[56:58].tolist() == [0, -4]


def test_engine_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_engine, "Engine", FakeEngine)
    monkeypatch.setattr(harness, "peaks", lambda device: PEAKS)
    flags = f"bench_engine.py --device cpu --max-tokens 9 --repeat 1 --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [*flags.split(), "--temperature", "0"])
    bench_engine.main()
    rows = json.loads((tmp_path / "engine_cpu.json").read_text())["rows"]
    decode = [row for row in rows if row["kind"] == "decode"]
    assert [(r["drafter"], r["tree"], r["budget"]) for r in decode] == bench_engine.RUNS
    assert decode[0]["speedup"] == 1 and decode[1]["acceptance_length"] == 3
    forward = [row for row in rows if row["kind"] == "forward"]
    assert [row["N"] for row in forward] == [1, 2, 4, 8, 16, 32, 64]
    assert forward[0]["over_one"] == 1 and forward[1]["over_one"] == 3
    assert "acceptance_length" in capsys.readouterr().out


@pytest.mark.parametrize("document, name", tables.BLOCKS)
def test_documents_have_the_results(document, name):
    text = (tables.ROOT / document).read_text()
    assert tables.replaced(text, name, tables.BLOCKS[document, name]()) == text


def test_tables_of_the_engine():
    """A case that one of the files lacks, or one that is no longer run."""
    row = {"kind": "decode", "drafter": "dflash", "tree": "best-first", "budget": 7}
    row |= {"temperature": 0.7, "acceptance_length": 2.5, "tokens_per_s": 99.6, "speedup": 1.5}
    forward = {"kind": "forward", "N": 8, "ms": 1.26}
    rows = {"CPU": [row, row | {"budget": 9}, forward], "H200": []}
    lines = tables.decode_table(rows).splitlines()
    assert len(lines) == 2 + len(bench_engine.RUNS)
    assert "| 0.7 | dflash, tree of 7 | 2.50 | 100 | 1.50 | – | – | – |" in lines
    assert "| 0.7 | AR | – | – | – | – | – | – |" in lines
    row |= {"ms_per_round": 2.0, "graphs": False}
    graph = row | {"ms_per_round": 0.5, "graphs": True, "tokens_per_s": 400}
    [_, _, line] = tables.launches_table([graph, row, forward]).splitlines()
    numbers = "2.50 | 2.00 | 0.50 | 100 | 400"
    assert line == f"| 0.7 | dflash, tree of 7 | {numbers} |"
    assert tables.launches_table([row | {"graphs": True}]) == ""
    assert tables.forward_table(rows).splitlines()[2:] == ["| CPU | 1.3 |", "| H200 | – |"]


@pytest.mark.parametrize(
    "text", ["", "<!-- a: end -->\n<!-- a: made by benchmarks/tables.py -->\n"]
)
def test_a_document_without_its_marks(text):
    with pytest.raises(ValueError, match="the document wants one line"):
        tables.replaced(text, "a", "")


def test_a_round_without_layers():
    """It is the engine's: one that finds what it looks up, of which the first token is right."""
    engine = bench_round.Layerless(known=130, room=160, nodes=8, device=CPU)
    for _ in range(2):
        made = engine.round()
        (landed,) = made.read(made.packed).emitted
        assert landed.token_ids == engine.tokens and landed.accepted == 1 < landed.offered
        assert list(engine.check(made)) == ["draft", "forward", "verify", "commit"]
        assert engine.state.length.tolist() == [132] and engine.cache.context.tolist() == [131]
        engine.reset()
    engine.tokens[0] += 1
    with pytest.raises(AssertionError):
        engine.check(made)
