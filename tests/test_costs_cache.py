"""Costs that one engine measured and the next one takes."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_engine
import torch
from test_engine import engine_of

from kdtree import Costs, NgramConfig, SamplingParams, costs_cache
from kdtree import measure as measuring
from kdtree.costs_cache import directory, key, read, write

SIZES = [1, 2, 8]
COSTS = Costs({1: 0.1, 2: 0.12, 8: 0.3}, 0.05)
WEIGHTS = [("w", torch.zeros(2, 3)), ("b", torch.zeros(3, dtype=torch.int32))]
REST = {"model": "m", "nodes": 8, "cuda_graphs": False}


def of(weights=WEIGHTS, device="cpu", **rest):
    return key(torch.device(device), weights, **REST | rest)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kdtree"


def names(home) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def test_what_was_written_is_read(home):
    assert read(of(), SIZES) is None
    write(of(), COSTS)
    assert read(of(WEIGHTS[::-1]), SIZES) == COSTS
    assert len(names(home)) == 1
    write(of(), Costs({1: 0.2, 2: 0.22, 8: 0.4}))
    assert read(of(), SIZES).rounds[1] == 0.2 and len(names(home)) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n"},
        {"nodes": 9},
        {"cuda_graphs": True},
        {"more": 1},
        {"weights": WEIGHTS[:1]},
        {"weights": [("w", torch.zeros(3, 2)), WEIGHTS[1]]},
        {"weights": [("w", torch.zeros(2, 3, dtype=torch.bfloat16)), WEIGHTS[1]]},
        {"weights": [("v", torch.zeros(2, 3)), WEIGHTS[1]]},
    ],
)
def test_another_key_is_another_matter(other):
    write(of(), COSTS)
    assert read(of(**other), SIZES) is None


@pytest.mark.parametrize("name", ["card", "mma_sync", "_package"])
def test_so_is_other_hardware_or_software(name, monkeypatch):
    write(of(), COSTS)
    monkeypatch.setattr(costs_cache, name, lambda *_: "another")
    assert read(of(), SIZES) is None


def test_so_are_threads():
    write(of(), COSTS)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert read(of(), SIZES) is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        b"\xff\xfe",
        "[" * 100_000,
        {"key": None},
        {"rounds": None},
        {"rounds": [0.1, 0.2]},
        {"rounds": {"1": 0.1, "2": 0.2}},  # other sizes
        {"rounds": {"1": 0.1, "2": 0.2, "x": 0.3}},
        {"rounds": {"1": 0.1, "2": 0.2, "8": float("nan")}},
        {"rounds": {"1": 0.1, "2": 0.2, "8": "0.3"}},
        {"rounds": {"1": 0.1, "2": 0.2, "8": -1}},
        {"draft": -1},
        {"draft": None},
    ],
)
def test_what_does_not_fit_is_measured_anew(text, home):
    """Broken, or of another key by the same name."""
    write(of(), COSTS)
    [path] = home.iterdir()
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read(of(), SIZES) is None
    write(of(), COSTS)
    assert read(of(), SIZES) == COSTS


def test_no_place_to_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for base in tmp_path / "file", tmp_path / "file" / "below":
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        write(of(), COSTS)
        assert read(of(), SIZES) is None


def test_where(tmp_path, monkeypatch):
    assert directory() == tmp_path / "kdtree"
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for nothing in "", "relative":  # as the specification has it
        monkeypatch.setenv("XDG_CACHE_HOME", nothing)
        assert directory() == tmp_path / "me" / ".cache" / "kdtree"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert directory() is None
    write(of(), COSTS)
    assert read(of(), SIZES) is None


def test_many_write_at_once(home):
    """Whoever reads meanwhile finds one of them, whole."""
    tables = [Costs({1: 1.0 + i, 2: 2.0 + i, 8: 3.0 + i}, 0.5 + i) for i in range(8)]
    write(of(), tables[0])

    def work(i: int) -> bool:
        write(of(), tables[i % 8])
        return read(of(), SIZES) in tables

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert len(names(home)) == 1


def test_an_engine_takes_what_one_like_it_measured(device, home, monkeypatch):
    """As often as it is measured, so many differ from those before."""
    measured = []

    def measure(*arguments):
        measured.append(arguments[3].nodes)
        costs = {size: 1.0 + size + len(measured) for size in measuring.sizes_up_to(measured[-1])}
        return Costs(costs, 0.5), len(measured) != 2

    monkeypatch.setattr(measuring, "measure", measure)

    def made(
        name="base", dtype="float32", drafter="ngram", batch=1, positions=200, **options
    ) -> float:
        monkeypatch.setattr(test_engine, "MAX_SEQ_LEN", positions)
        engine = engine_of(name, device, dtype, drafter, batch, budget="auto", **options)
        return engine.drafter.costs.rounds[1]

    assert made() == made() == 3.0
    assert made(batch=2) == 4.0 and made(batch=2) == 5.0 == made(batch=2)  # first it was not calm
    others = [
        {"remeasure": True},
        {"name": "dims"},
        {"name": "int4"},
        {"dtype": "bfloat16"},
        {"positions": 192},
        {"kv_cache_dtype": "fp8"},
        {"drafter": NgramConfig(matches=3)},
        {"drafter": NgramConfig(budget=8)},
        {"drafter": "dflash", "name": "dflash"},
        {"drafter": "dflash", "name": "dflash2"},
        {"tree": "chain"},
        {"chain_seed": True},
    ]
    if device.type == "cuda":
        others.append({"cuda_graphs": False})
    for n, other in enumerate(others, 6):
        assert made(**other) == n, other
    assert made() == 6.0  # as measured anew
    assert len(names(home)) == 1 + len(others)


def test_outputs_with_costs_from_before(device):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, second = (engine_of("base", device, "float32", "ngram") for _ in range(2))
    assert (
        first.generate([1, 2, 3], params).token_ids == second.generate([1, 2, 3], params).token_ids
    )
