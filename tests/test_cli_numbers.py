"""Numbers on the command line that are out of range, or none: one clear line says so."""

import pytest
from fake_engine import FakeEngine

from kdtree import cli
from kdtree.cli import options

PLANNED = "tests/data/deepseek-v3/config.json"


@pytest.mark.parametrize("digits", [9, 40, 400, 5000])
@pytest.mark.parametrize(
    "command",
    [
        *(f"generate p --{name} 9" for name in ("seed", "top-k", "logprobs", "budget")),
        *(f"generate p --{name} 9" for name in ("max-seq-len", "stop-token-ids", "temperature")),
        *(f"{c} --{name} 9" for c in ("demo", "bench") for name in ("seed", "budget")),
        *(f"{c} --drafter oracle:9 --max-tokens 2" for c in ("demo", "bench")),
        "bench --repeat 9",
        *(f"plan {PLANNED} --{name} 9" for name in ("gpus", "context", "nodes")),
        *(f"plan {PLANNED} --{name} 9" for name in ("gpu-memory", "bandwidth")),
        "demo --device cuda:9",
    ],
)
def test_numbers_out_of_range(command, digits, capsys):
    """After argparse's usage where it is its."""
    if command.endswith(("seed 9", "temperature 9", "top-k 9")) and digits == 9:
        pytest.skip("in range")
    words = [word.replace("9", "9" * digits) for word in command.split()]
    try:
        code = cli.main(words)
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert err.startswith("usage: ") or err == f"{last}\n"
    assert len(last) < 240 and "int_max_str" not in err and "invalid" not in last
    assert "wants" in last or "the model has" in last or "finds no CUDA" in last


def test_what_is_no_number(capsys):
    for flag, wants in (("--seed", "an integer"), ("--budget", "an integer"), ("--top-p", "a num")):
        with pytest.raises(SystemExit):
            cli.main(["generate", "p", flag, "x"])
        assert f"argument {flag}: 'x', wants {wants}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--drafter oracle:x", "--drafter y", "--budget 64", "--tree z"])
@pytest.mark.parametrize("command", ["demo", "bench"])
def test_mistakes_show_before_anything_runs(monkeypatch, capsys, command, flags):
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(options, "Engine", FakeEngine)
    code = cli.main([command, *flags.split()])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1 and not FakeEngine.made
