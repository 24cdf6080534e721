"""The commands over an engine that writes a fixed text, so that what they show is known."""

import inspect
import io
import json
import sys
from importlib.resources import files

import pytest
from fake_engine import TEXT, Bytes, FakeEngine

from kdtree import ConfigError, DflashConfig, Engine, NumericsError, cli
from kdtree.cli import demo, draw, options


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(options, "Engine", FakeEngine)
    return FakeEngine


def run(capsys, *arguments):
    code = cli.main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_demo_json_is_one_object(engine, capsys):
    code, out, err = run(capsys, "demo", "--json", "--max-tokens", "12", "--prompt", "p")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    text = TEXT[:12]
    assert facts["identical"] is True
    assert facts["ar"] == {"forwards": 12, "seconds": 12, "tokens": 12, "text": text}
    tree = {"forwards": 3, "seconds": 3, "tokens": 12, "text": text, "acceptance_length": 4.0}
    tree |= {"histogram": [0, 0, 0, 0, 3], "acceptance_by_depth": [1, 1, 1]}
    assert facts["ddtree"] == tree
    assert (facts["drafter"], facts["upper_bound"]) == ("dflash", False)
    assert engine.made[1].drafter == "dflash" and engine.made[1].options["budget"] == demo.BUDGET
    assert facts["speedup"] == facts["fewer_forwards"] * facts["forward_time_ratio"] == 4


def test_demo_shows_both_texts_the_tree_and_the_gain(engine, capsys):
    code, out, err = run(capsys, "demo", "--max-tokens", "20")
    assert (code, err) == (0, "")
    assert out.count("[os]") == 2 and "\x1b" not in out
    assert "The 20 tokens are identical." in out
    assert "tokens by one forward: 4." in out
    assert "dflash drafter is a small trained model" in out and "UPPER BOUND" not in out
    assert "i -0.25 ✓" in out and "X -3.50\n" in out and "the target's own" in out
    assert "Speed-up 4.00 at acceptance length 4.00 = 4.00 by fewer forwards" in out


def test_demo_passes_its_options_on(engine, capsys):
    flags = "--temperature 0.5 --seed 3 --budget 9 --tree chain --device cpu --model x --json"
    flags += " --remeasure"
    code, *_ = run(capsys, "demo", *flags.split())
    first, second = engine.made
    assert code == 0 and (first.drafter, second.drafter) == ("none", "ngram")
    asked = {"model": "x", "budget": 9, "tree": "chain", "device": "cpu", "remeasure": True}
    assert second.options == asked
    params = second.calls[-1][1]
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 3, 128)


def test_demo_labels_the_oracle(engine, capsys):
    code, out, _ = run(capsys, "demo", "--drafter", "oracle:0.5", "--prompt", "p")
    oracle = engine.made[1].drafter
    assert code == 0 and "UPPER BOUND" in out and "dflash" not in out
    assert oracle.accuracy == 0.5 and bytes(oracle.truth[0]).decode() == "p" + TEXT


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_demo_fails_loudly_where_the_tokens_differ(engine, capsys, monkeypatch, flags):
    honest = engine.rounds
    monkeypatch.setattr(
        engine, "rounds", lambda self, p: honest(self, p)[: 5 if self.width == 4 else None]
    )
    code, out, err = run(capsys, "demo", *flags)
    assert code == 1 and "THE TOKENS DIFFER from token 20 on" in err
    assert not flags or json.loads(out)["identical"] is False


def test_demo_of_an_empty_text(engine, capsys, monkeypatch):
    monkeypatch.setattr(engine, "text", "")
    code, out, err = run(capsys, "demo")
    assert (code, err) == (0, "") and "The 0 tokens are identical." in out
    assert json.loads(run(capsys, "demo", "--json")[1])["speedup"] is None


def test_demo_says_where_a_text_repeats(engine, capsys, monkeypatch):
    monkeypatch.setattr(engine, "text", "again " * 9)
    assert "The text repeats itself" in run(capsys, "demo")[1]


@pytest.mark.parametrize("command", ["demo", "generate p", "bench"])
def test_a_given_drafter_is_dflash_s(engine, capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr(cli.bench.machine, "peaks", lambda device: cli.bench.machine.Peaks(1, 1))
    flags = ["--drafter-model", str(tmp_path), "--budget", "auto"]
    code, _, err = run(capsys, *command.split(), *flags)
    assert code == 0 and engine.made[-1].drafter == DflashConfig(model=tmp_path)
    assert engine.made[-1].options["budget"] == "auto"
    code, out, err = run(capsys, *command.split(), *flags, "--drafter", "ngram")
    assert (code, out) == (2, "") and "one of dflash, but the drafter is" in err
    missing = ["--drafter-model", str(tmp_path / "x")]
    made = len(engine.made)
    code, out, err = run(capsys, *command.split(), *missing)
    assert (code, out) == (2, "") and "x is not a directory" in err and len(engine.made) == made


def test_a_model_without_a_drafter(engine, capsys, tmp_path):
    """Is drafted for by look-up; dflash is refused before anything runs."""
    flags = "demo", "--model", str(tmp_path)
    assert run(capsys, *flags)[0] == 0 and engine.made[-1].drafter == "ngram"
    made = len(engine.made)
    code, out, err = run(capsys, *flags, "--drafter", "dflash")
    assert (code, out) == (2, "") and "dflash wants a drafter" in err and len(engine.made) == made
    (tmp_path / "drafter").mkdir()
    assert run(capsys, *flags)[0] == 0 and engine.made[-1].drafter == "dflash"


def test_plain_decoding_beside_itself(engine, capsys):
    code, *_ = run(capsys, "demo", "--drafter", "none")
    assert code == 0 and engine.made[1].options["budget"] == "auto"


def test_generate_has_no_oracle(engine, capsys):
    code, out, err = run(capsys, "generate", "p", "--drafter", "oracle")
    assert (code, out) == (2, "") and "only demo and bench know" in err and not engine.made


def test_generate_writes_the_text_and_nothing_else(engine, capsys):
    code, out, err = run(capsys, "generate", "p", "--max-tokens", "9")
    assert (code, out, err) == (0, TEXT[:9] + "\n", "")


def test_generate_reads_stdin_as_it_is(engine, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("a prompt\n"))
    run(capsys, "generate")
    assert engine.made[0].calls[0][0] == "a prompt\n"


@pytest.mark.parametrize("flags", [[], ["--n", "2"]])
def test_generate_chats(engine, capsys, flags):
    user = {"role": "user", "content": "p"}
    code, out, err = run(capsys, "generate", "p", "--max-tokens", "9", *flags)
    assert engine.made[0].messages is None
    assert run(capsys, "generate", "p", "--chat", "--max-tokens", "9", *flags) == (code, out, err)
    assert engine.made[1].messages == [user]
    run(capsys, "generate", "p", "--chat", "--system", "s", *flags)
    assert engine.made[2].messages == [{"role": "system", "content": "s"}, user]
    code, out, err = run(capsys, "generate", "p", "--system", "s", *flags)
    assert (code, out) == (2, "") and "--chat" in err


def test_generate_chat_without_a_template(capsys):
    code, out, err = run(capsys, "generate", "p", "--chat", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.startswith("kdtree: the model has no chat template") and err.count("\n") == 1


def test_generate_passes_every_parameter_on(engine, capsys):
    flags = (
        "--max-tokens 7 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 5 --n 2 "
        "--stop ab --stop cd --stop-token-ids 3 --stop-token-ids 4 --ignore-eos --min-tokens 2 "
        "--logprobs 3 --drafter ngram"
    )
    code, out, _ = run(capsys, "generate", "p", *flags.split())
    params = engine.made[0].calls[0][1]
    assert code == 0 and engine.made[0].drafter == "ngram"
    assert params == cli.generate.SamplingParams(
        max_tokens=7, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=5, n=2,
        stop=("ab", "cd"), stop_token_ids=(3, 4), ignore_eos=True, min_tokens=2, logprobs=3,
    )  # fmt: skip
    assert out == "".join(f"--- completion {i} of 2\n{TEXT[:7]}\n" for i in (1, 2))


def test_generate_stats(engine, capsys):
    flags = ("--stats", "--drafter", "ngram", "--max-tokens", "9")
    _, out, err = run(capsys, "generate", "p", *flags)
    assert out == TEXT[:9] + "\n"
    assert "9 tokens in 3 rounds, acceptance length 3.00" in err
    assert "rounds by tokens emitted: 1: 1, 4: 2" in err
    _, _, err = run(capsys, "generate", "p", *flags, "--n", "2")
    assert err.count("rounds by tokens emitted: 1: 1, 4: 2") == 2


def test_generate_draws_every_round_and_lists_logprobs_on_stderr(engine, capsys):
    flags = "--trace --logprobs 1 --drafter ngram --max-tokens 9".split()
    code, out, err = run(capsys, "generate", "p", *flags)
    assert (code, out) == (0, TEXT[:9] + "\n")
    assert err.count("the target's own") == 3 and "round 3, tokens: 1" in err
    assert err.count("A -2.000") == 9


def test_an_interruption_is_clean(engine, capsys, monkeypatch):
    monkeypatch.setattr(engine, "error", KeyboardInterrupt())
    code, out, err = run(capsys, "generate", "p")
    assert (code, out, err) == (130, "", "\n")


@pytest.mark.parametrize(
    "error",
    [ConfigError("no such key:\n  x"), NumericsError(3, 7), ValueError("no"), TypeError("no")],
)
@pytest.mark.parametrize("command", ["demo", "generate", "bench"])
def test_a_mistake_is_one_line(engine, capsys, monkeypatch, command, error):
    monkeypatch.setattr(engine, "error", error)
    code, out, err = run(capsys, command, *["p"] * (command == "generate"))
    assert code == 2 and out == ""
    assert err.startswith("kdtree: ") and err.count("\n") == 1


def test_wrong_options_are_usage_errors(capsys):
    for flags in ([], ["demo", "--budget", "x"], ["generate", "--nonsense"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(flags)
    assert "Traceback" not in capsys.readouterr().err
    assert cli.main(["generate", "p", "--top-p", "2"]) == 2
    assert "top_p is 2.0" in capsys.readouterr().err


def test_bench_rows(engine, capsys, tmp_path, monkeypatch):
    peaks = cli.bench.machine.Peaks(1e9, 1e12)
    monkeypatch.setattr(cli.bench.machine, "peaks", lambda device: peaks)
    path = tmp_path / "b.json"
    flags = ["--drafter", "ngram", "--drafter", "oracle", "--json", str(path), "--max-tokens", "9"]
    code, out, _ = run(capsys, "bench", *flags)
    results = json.loads(path.read_text())
    facts = "card clocks driver date commit torch bandwidth peak rows".split()
    assert code == 0 and list(results) == facts
    plain, ngram, oracle = results["rows"]
    prompts = len(cli.bench.PROMPTS)
    assert (plain["speedup"], plain["acceptance_length"]) == (1.0, 1.0)
    assert (ngram["speedup"], ngram["acceptance_length"]) == (3.0, 3.0)
    assert ngram["tokens_per_s"] == 3 and ngram["tokens"] == 9 * prompts
    assert ngram["histogram"] == [0, prompts, 0, 0, 2 * prompts]
    assert plain["acceptance_by_depth"] == []
    assert ngram["acceptance_by_depth"] == [pytest.approx(2 / 3), 1, 1]
    assert "ngram: accepted by depth, where the tree was so deep: 1: 67%, 2: 100%, 3: 100%" in out
    assert ngram["phases_ms"]["forward"] == pytest.approx(2000 / 3)
    assert oracle["identical"] and len(engine.made[2].drafter.truth) == prompts
    assert "UPPER BOUND" in out and "3.00" in out


def test_bench_s_own_drafters(engine, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli.bench.machine, "peaks", lambda device: cli.bench.machine.Peaks(1, 1))
    assert run(capsys, "bench")[0] == 0
    assert [made.drafter for made in engine.made] == ["none", "ngram", "dflash"]
    assert run(capsys, "bench", "--model", str(tmp_path))[0] == 0
    assert [made.drafter for made in engine.made[3:]] == ["none", "ngram"]


def test_bench_wants_a_file_that_can_be_written(engine, capsys, tmp_path):
    code, _, err = run(capsys, "bench", "--json", str(tmp_path / "none/b.json"))
    assert code == 2 and "b.json" in err and not engine.made


def test_tokens_are_shown_on_one_line():
    names = [draw.token(Bytes(), id) for id in b"a \n\t\x1b\xf0"]
    assert names == ["a", "·", "⏎", "⇥", "␛", "<f0>"]
    assert draw.token(None, 17) == "17"


@pytest.mark.skipif(not (files("kdtree") / "demo/config.json").is_file(), reason="no demo model")
@pytest.mark.parametrize("drafter", ["dflash", "oracle:0.8"])
def test_demo_model_is_lossless(capsys, drafter):
    flags = "--json --max-tokens 24 --temperature 0.7 --device cpu --drafter".split()
    code, out, _ = run(capsys, "demo", *flags, drafter)
    facts = json.loads(out)
    assert code == 0 and facts["identical"] and facts["ddtree"]["tokens"] == 24
    assert facts["ddtree"]["acceptance_length"] > 1.5  # and 1 for a drafter that is wrong


def test_the_fake_takes_what_the_engine_takes():
    real, fake = (
        {name: p.default for name, p in inspect.signature(kind).parameters.items()}
        for kind in (Engine, FakeEngine)
    )
    assert fake == real
