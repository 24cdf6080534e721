"""The benchmark of acceptance: its figures from what a run returned, and the document it writes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtree.outputs import Completion, Metrics, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import acceptance  # noqa: E402
import acceptance_report  # noqa: E402


def result(ids, rounds, offered=(), accepted=()):
    metrics = Metrics(
        tokens=len(ids), rounds=rounds, decode_s=0.5, offered=list(offered), accepted=list(accepted)
    )
    return Result("", [1], [Completion(0, token_ids=ids, metrics=metrics)])


def test_figures_of_two_prompts():
    looping, varied = [1, 2, 3, 4] * 8, list(range(32))
    results = [result(looping, 4, [4, 2], [3, 1]), result(varied, 16, [16], [10])]
    got = acceptance.figures(results, results)
    assert got["tokens"] == 64 and got["rounds"] == 20
    assert got["acceptance_length"] == pytest.approx(3.2)
    assert got["offered"] == [20, 2] and got["accepted"] == [13, 1]
    assert got["looping"] == 0.5 and got["not_looping"] == pytest.approx(2.0)
    assert got["distinct_4"] == pytest.approx((4 / 29 + 1) / 2)
    assert 0 < got["error"] < 3


def test_other_tokens_than_plain_decoding_are_no_figures():
    with pytest.raises(AssertionError, match="other tokens"):
        acceptance.figures([result([1, 2, 3], 1)], [result([1, 2, 4], 3)])


def test_times_are_over_plain_decoding():
    got = acceptance.times([result([1] * 8, 2)], [result([1] * 8, 8)] * 2)
    assert got["tokens_per_s"] == 16 and got["speedup"] == 2 and got["ms_per_round"] == 250


@pytest.mark.parametrize("name", ["code", "prose", "other"])
def test_prompts(name):
    texts = acceptance.prompts_of(200)[name]
    assert len(texts) == len(set(texts)) == 200 and all(len(text) >= 64 for text in texts)


def test_every_run_makes_an_engine_that_agrees(tmp_path):
    """One short prompt through every way of drafting; the document of what came out."""
    arguments = SimpleNamespace(
        model=None, device="cpu", sequences=1, temperature=[1.0], timed=1, prompts=1
    )
    prompts = {name: texts[:1] for name, texts in acceptance.prompts_of(1).items()}
    few = {"code": prompts["code"], "prose": prompts["prose"]}
    acceptance.TOKENS, tokens = 6, acceptance.TOKENS
    try:
        rows = [*acceptance.acceptance(arguments, few), *acceptance.parts(arguments, few)]
    finally:
        acceptance.TOKENS = tokens
    assert len(rows) == 2 * (2 + len(acceptance.RUNS) + len(acceptance.PARTS))
    text = "\n".join(acceptance_report.acceptance(acceptance_report.kind(rows, "acceptance")))
    assert "DFlash, tree, 63" in text and "prompt look-up" in text
