"""The benchmark of acceptance: its figures from what a run returned, and the document it writes."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kdtree.outputs import Completion, Metrics, Result

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import acceptance  # noqa: E402
import acceptance_paired  # noqa: E402
import acceptance_report  # noqa: E402
from acceptance_paired import Taken  # noqa: E402


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


class Slowing:
    """A machine that takes a tenth longer for everything from one round to the next, and for the
    first round of a text, with the prompt, a hundred times as long."""

    def __init__(self, monkeypatch):
        self.now, self.slow = 0.0, 1.0
        monkeypatch.setattr(acceptance_paired.time, "perf_counter", lambda: self.now)

    def engine(self, seconds, each):
        """each: tokens of its rounds after the first"""

        def stream(text, params):
            for n, tokens in enumerate(each, -1):
                self.now += seconds * self.slow * (100 if n < 0 else 1)
                self.slow *= 1.1
                yield SimpleNamespace(token_ids=list(range(tokens)))

        return SimpleNamespace(stream=stream)


def test_paired_costs_do_not_follow_the_machine(monkeypatch):
    machine = Slowing(monkeypatch)
    plain = acceptance_paired.clock(machine.engine(1.0, [1, 1, 1, 1]), ["a", "b"], None)
    engines = {"slow": machine.engine(3.0, [1] * 9), "fast": machine.engine(2.0, [1] * 9)}
    found = acceptance_paired.taken(engines, plain, "", None)
    assert all((each.tokens, each.rounds) == (8, 8) for each in found.values())
    assert found["slow"].plain == pytest.approx(24, rel=0.04)
    assert found["fast"].plain == pytest.approx(16, rel=0.04)


def test_paired_engines_that_differ_are_no_figures(monkeypatch):
    machine = Slowing(monkeypatch)
    plain = acceptance_paired.clock(machine.engine(1.0, [1] * 9), [""], None)
    engines = {"one": machine.engine(1.0, [1, 1, 2]), "other": machine.engine(1.0, [1, 1, 1])}
    with pytest.raises(AssertionError, match="tokens differ"):
        acceptance_paired.taken(engines, plain, "", None)


def test_paired_gains_are_over_the_better_of_plain_and_chain():
    auto = [Taken(10, 2, 5.0, 2), Taken(30, 8, 15.0, 8)]
    chain = [Taken(10, 2, 8.0, 2), Taken(30, 8, 24.0, 8)]
    got = acceptance_paired.figures(auto, chain)
    assert got["acceptance_length"] == 4 and got["tokens"] == 40
    assert got["speedup"] == pytest.approx(2) and got["over_better"] == pytest.approx(1.6)
    assert got["error"] == pytest.approx(0) and got["over_better_error"] == pytest.approx(0)
    slower = acceptance_paired.figures(auto, [Taken(10, 2, 20.0, 2), Taken(30, 8, 60.0, 8)])
    assert slower["over_better"] == pytest.approx(2)  # plain decoding is the better
    runs = {acceptance.CHAIN: slower, acceptance.AUTO: got}
    rows = [acceptance.facts(run, "code", 1.0) | each for run, each in runs.items()]
    *_, line = acceptance_report.paired(rows)
    assert line == "| code, T=1 | 2.00 ± 0.00 (4.00) | 2.00 ± 0.00 (4.00) | 1.60 ± 0.00 |"


def test_paired_errors_are_over_texts():
    """Of each text both, where both go up and down with it."""
    auto = [Taken(10, 2, 5.0, 2), Taken(10, 2, 2.5, 2)]
    chain = [Taken(10, 2, 2 * each.plain / 1.5, 2) for each in auto]
    got = acceptance_paired.figures(auto, chain)
    means = [10 / 5, 20 / 7.5, 20 / 7.5, 10 / 2.5]  # of the four ways to draw two
    spread = (sum((m - sum(means) / 4) ** 2 for m in means) / 4) ** 0.5
    assert got["error"] == pytest.approx(spread, rel=0.05)
    assert got["over_better_error"] == pytest.approx(0) and got["over_better"] == pytest.approx(
        4 / 3
    )


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
