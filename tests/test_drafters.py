"""Drafters: what they propose, apart from the loop that makes any proposal right."""

import random
from dataclasses import replace

import pytest
import torch
from variants import variant

from kdtree import NgramConfig, OracleConfig, SamplingParams
from kdtree.config import load
from kdtree.drafters import Setup
from kdtree.state import State

CAPACITY = 96


def setup(device, budget=None, chain=False, chain_seed=False, sequences=1) -> Setup:
    directory = variant("dense")
    target = replace(load(directory), vocab=100)
    return Setup(
        budget, chain, chain_seed, target, directory, sequences, CAPACITY, device, torch.float32
    )


def state_of(histories, device) -> State:
    state = State(len(histories), CAPACITY, device)
    for b, tokens in enumerate(histories):
        state.start(b, tokens, SamplingParams(), [])
    return state


def paths(tree, b) -> list[tuple[int, ...]]:
    """Every node's tokens from the root's child on, in node order."""
    token, parent = tree.token[b].tolist(), tree.parent[b].tolist()
    found = [()]
    for n in range(1, len(token)):
        if parent[n] >= 0:
            assert parent[n] < n
            found.append(found[parent[n]] + (token[n],))
    assert parent[0] == -1
    return found[1:]


def continuations(tokens, config) -> list[tuple[int, ...]]:
    """What prompt look-up may propose: after the longest, then latest, matches of the end."""
    last, ranked = len(tokens) - 1, []
    for end in range(last):
        n = 0
        while n < config.length and n <= end and tokens[end - n] == tokens[last - n]:
            n += 1
        if n:
            ranked.append((n, end))
    ranked.sort(reverse=True)
    return [tuple(tokens[e + 1 : e + 1 + config.depth]) for _, e in ranked[: config.matches]]


@pytest.mark.parametrize("matches", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_ngram_proposes_what_followed_before(matches, length, device):
    rng = random.Random(matches * 10 + length)
    histories = [[rng.randrange(4) for _ in range(rng.randint(1, 60))] for _ in range(20)]
    config = NgramConfig(length=length, matches=matches, depth=5)
    drafter = config.create(setup(device, budget=63, sequences=len(histories)))
    tree = drafter.propose(state_of(histories, device))
    for b, tokens in enumerate(histories):
        want = continuations(tokens, config)
        prefixes = {c[:j] for c in want for j in range(1, len(c) + 1)}
        got = paths(tree, b)
        assert len(got) == len(set(got)), "a node stands twice"
        assert set(got) == prefixes
        if want:
            assert got[0] == want[0][:1], "the best match comes first"


def test_ngram_chain_follows_the_best_match(device):
    history = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]
    drafter = NgramConfig(depth=4).create(setup(device, chain=True))
    assert paths(drafter.propose(state_of([history], device)), 0)[-1] == (4, 5, 9, 2)


def test_nothing_to_look_up_is_the_root_alone(device):
    drafter = NgramConfig().create(setup(device, sequences=2))
    tree = drafter.propose(state_of([[5], [1, 2, 3]], device))
    assert paths(tree, 0) == paths(tree, 1) == []
    assert tree.ancestors[:, 0].tolist() == [1, 1]
    assert (tree.parent[:, 1:] == -2).all() and (tree.ancestors[:, 1:] == 0).all()


def test_inactive_sequences_are_padding(device):
    drafter = NgramConfig().create(setup(device, sequences=2))
    state = state_of([[1, 2, 1], [1, 2, 1]], device)
    state.halt(1)
    tree = drafter.propose(state)
    assert paths(tree, 0) and (tree.parent[1] == -2).all() and (tree.ancestors[1] == 0).all()


@pytest.mark.parametrize("accuracy", [0.0, 0.4, 1.0])
def test_oracle_ranks_the_truth_first_as_often_as_asked(accuracy, device):
    truth = tuple(random.Random(0).randrange(100) for _ in range(CAPACITY))
    config = OracleConfig((truth,), accuracy, candidates=3, depth=1)
    drafter = config.create(setup(device, budget=1))
    hits = 0
    for n in range(1, CAPACITY - 1):
        drafter.start(0, 0, list(truth[:n]))
        tree = drafter.propose(state_of([list(truth[:n])], device))
        hits += paths(tree, 0) == [(truth[n],)]
    assert hits / (CAPACITY - 2) == pytest.approx(accuracy, abs=0.15 if 0 < accuracy < 1 else 0)


def test_oracle_grows_every_shape(device):
    truth = tuple(random.Random(1).randrange(100) for _ in range(CAPACITY))
    drafter = OracleConfig((truth,), 0.5, 4, depth=6).create(setup(device, budget=15))
    shapes = set()
    for n in range(1, 60):
        drafter.start(0, 0, list(truth[:n]))
        shapes.add(tuple(drafter.propose(state_of([list(truth[:n])], device)).parent[0].tolist()))
    assert len(shapes) > 40


@pytest.mark.parametrize(
    "config, message",
    [
        (NgramConfig(depth=16), "depth is 16, wants 1 to 15"),
        (NgramConfig(matches=0), "matches is 0, wants 1 to 64"),
        (NgramConfig(budget=64), "budget is 64, wants 0 to 63"),
        (
            OracleConfig(((1,),), accuracy=1.5),
            r"accuracy is 1.5, wants a finite number in \[0, 1\]",
        ),
        (OracleConfig(((1,),), depth=0), "depth is 0, wants 1 to 15"),
    ],
)
def test_refuses_configs_out_of_range(config, message, device):
    with pytest.raises(ValueError, match=message):
        config.create(setup(device))


def test_oracle_refuses_another_prompt(device):
    drafter = OracleConfig(((1, 2, 3),)).create(setup(device))
    with pytest.raises(ValueError, match="does not begin with the prompt"):
        drafter.start(0, 0, [1, 3])
    with pytest.raises(ValueError, match="knows 1 completions, asked for number 1"):
        drafter.start(0, 1, [1, 2])
