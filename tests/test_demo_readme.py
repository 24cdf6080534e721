"""The demo's README says of the shipped drafter what the log of its training does."""

import json
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "kdtree" / "demo"
LOG = json.loads((DEMO / "drafter" / "train_log.json").read_text())
README = " ".join((DEMO / "README.md").read_text().split())
KINDS = "code", "prose"
LAWS = {
    "own probabilities": "plain",
    "sharpened": "sharpened",
    "sharpened and coupled": "law",
    "the same, bigram edges": "law + bigram",
    "the same, selector edges (shipped)": "law + selector",
    "the same, both edges": "law + both",
}


@pytest.mark.parametrize("T", ["0.0", "0.7", "1.0"])
@pytest.mark.parametrize("name", LAWS)
def test_tokens_a_round(T, name):
    law = LAWS[name]
    if T == "0.0" and law == "law":
        pytest.skip("nothing is coupled at T = 0")
    if T == "0.0" and law == "sharpened":
        law = "law"
    both = [LOG["judged"][f"{kind} T={T}"][law] for kind in ("code", "prose")]
    trees = "chain", "tree 7", "tree 15", "tree 31", "tree 63"
    cells = (f"{both[0][tree]:.2f} / {both[1][tree]:.2f}" for tree in trees)
    assert f"| {float(T):g} | {name} | {' | '.join(cells)} |" in README


def test_loops():
    share = [LOG["judged"][f"{k} T={T}"]["looping"] for T in (0.0, 0.7, 1.0) for k in KINDS]
    stated = (
        "{:.1%} of code and {:.1%} of prose at T = 0, {:.1%} and {:.1%} at 0.7, {:.1%} and {:.1%}"
    )
    assert stated.format(*share) in README
    calm = [LOG["judged"][f"{kind} T=0.0"]["law + selector"]["tree 7 calm"] for kind in KINDS]
    assert "A tree of 7, as shipped, has {:.2f} and {:.2f} at T = 0".format(*calm) in README


def test_training():
    run, size = LOG["run"], LOG["bytes"]["model.safetensors"]
    assert size == (DEMO / "drafter" / "model.safetensors").stat().st_size
    assert LOG["command"] in README
    blocks = f"{run['tokens'] / 1e6:.1f} M blocks (anchors) in {run['seconds']:.0f} s"
    assert f"{blocks} and {run['steps']:,} steps; {LOG['whole_seconds']:.0f} s" in README
    assert (
        f"{LOG['parameters'] / 1e6:.2f} M; matrices" in README and f"{size / 1e6:.2f} MB" in README
    )


def test_one_law_for_all_temperatures():
    """What it loses at the worst depth, beside the last one's loss."""
    lost, nats = [], []
    for T in ("0.0", "0.7", "1.0"):
        law, own = (LOG["fit"][f"T={T} {name}"]["nats"] for name in ("law", "couple"))
        more = max(a - b for a, b in zip(law, own, strict=True))
        lost.append(f"{more:.4f}")
        nats.append(f"{law[-1]:.1f}")
    assert "{} nats a token at T = 0, {} at 0.7 and {} at 1".format(*lost) in README
    assert "where the last depth's loss is {}, {} and {}".format(*nats) in README


def test_shipped_scores_are_the_fitted_ones():
    scores = json.loads((DEMO / "drafter" / "config.json").read_text())["kdtree_scores"]
    law = {name: LOG["fit"]["all T law"][name] for name in "abc"}
    assert scores == law | LOG["fit"]["law + selector"]
