"""Rounds' trees as the commands show them: on the terminal, and as pictures."""

import sys
from dataclasses import replace

import pytest
from fake_engine import TEXT, Bytes, FakeEngine, chain

from kdtree import RoundTrace, cli
from kdtree.cli import draw, options, plot

# A root with two children, the second of which has two; padding; the walk went to node 4.
BRANCHED = RoundTrace(
    token=[65, 66, 67, 68, 36, 0],
    parent=[-1, 0, 0, 2, 2, -2],
    score=[0.0, -2.0, -0.25, -3.0, -0.75, float("-inf")],
    path=[0, 2, 4],
    emitted=[67, 36, 70],
)


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(options, "Engine", FakeEngine)
    return FakeEngine


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib")


def run(capsys, *arguments):
    code = cli.main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return code, out, err


def test_nodes_of_a_round():
    root, wrong, right, other, leaf, own = draw.nodes(BRANCHED, Bytes())
    assert [n.token for n in (root, wrong, right, other, leaf, own)] == list("ABCD$F")
    assert [n.parent for n in (root, wrong, right, other, leaf, own)] == [-1, 0, 0, 2, 2, 4]
    assert [n.is_accepted for n in (wrong, right, other, leaf, own)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (root.note, right.note, own.note) == ("root", "-0.25", "the target's own")
    assert own.is_own and not leaf.is_own
    cut = RoundTrace(BRANCHED.token, BRANCHED.parent, BRANCHED.score, [0, 2, 4], [67, 36])
    assert len(draw.nodes(cut, Bytes())) == 5


def test_a_round_that_a_limit_cut_ends_in_a_draft():
    """Two of three tokens were kept: the second is node 4, which the walk would have gone to."""
    cut = replace(BRANCHED, path=[0, 2], emitted=[67, 36])
    nodes = draw.nodes(cut, Bytes())
    assert [node.is_accepted for node in nodes] == [True, False, True, False, True]
    assert not any(node.is_own for node in nodes)


def test_places_of_nodes():
    """Depth from the left; leaves one under the other, parents in the middle of their children."""
    assert plot._places([-1, 0, 0, 2, 2, 4]) == [
        (0, 0.75),
        (1, 0),
        (1, 1.5),
        (2, 1),
        (2, 2),
        (3, 2),
    ]


def test_a_picture(tmp_path, monkeypatch, matplotlib):
    from matplotlib.colors import same_color
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig

    def spy(figure, *arguments, **how):
        drawn.append(figure)
        save(figure, *arguments, **how)

    monkeypatch.setattr(Figure, "savefig", spy)
    plot.tree(BRANCHED, Bytes(), tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    texts = ["A  root", "B  -2.00", "C  -0.25", "D  -3.00", "$  -0.75", "F  the target's own"]
    assert [text.get_text() for text in axes.texts] == texts
    colors = [plot.DRAFTED, plot.ACCEPTED, plot.DRAFTED, plot.ACCEPTED, plot.OWN]
    for line, color in zip(axes.lines, colors, strict=True):
        assert same_color(line.get_color(), color)


def test_generate_draws_pictures(engine, capsys, tmp_path, matplotlib):
    flags = ("--drafter", "ngram", "--max-tokens", 9, "--trace-png")
    code, out, err = run(capsys, "generate", "p", *flags, tmp_path / "a" / "b")
    assert (code, out, err) == (0, TEXT[:9] + "\n", "")
    names = [f"round-00{i}.png" for i in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == names
    run(capsys, "generate", "p", *flags, tmp_path / "c", "--n", 2)
    both = [f"completion-{i}-{name}" for i in (1, 2) for name in names]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == both


def test_demo_shows_every_round(engine, capsys, tmp_path, matplotlib):
    flags = ("--max-tokens", 12, "--trace", "--trace-png", tmp_path)
    code, out, _ = run(capsys, "demo", *flags)
    assert code == 0 and out.count("the target's own") == 3
    assert "round 3, tokens: 4" in out and "Round 1 of 3" not in out
    assert "accepted by depth, where the tree was so deep: 1: 100%, 2: 100%, 3: 100%" in out
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("command", [("generate", "p"), ("demo",)])
def test_pictures_want_matplotlib(engine, capsys, tmp_path, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, *command, "--trace-png", tmp_path / "x")
    assert (code, out) == (2, "") and not engine.made
    missing = "--trace-png draws with matplotlib, which is not installed: pip install matplotlib"
    assert err == f"kdtree: {missing}\n"


def test_pictures_want_a_directory(engine, capsys, tmp_path, matplotlib):
    (tmp_path / "x").touch()
    code, out, err = run(capsys, "generate", "p", "--trace-png", tmp_path / "x")
    assert (code, out) == (2, "") and not engine.made and str(tmp_path / "x") in err


class Words:
    words = "$\\frac$", "^{", "你", "🙂", "\x1b"

    def token_bytes(self, id, special=False):
        return self.words[id % len(self.words)].encode()


def test_words_that_no_font_has(tmp_path, matplotlib, recwarn):
    """Nor are signs mathematics: dollars are dollars."""
    plot.tree(chain(list(range(5))), Words(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000 and not list(recwarn)
