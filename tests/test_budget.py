"""The automatic budget: its choice, what it learns, and that no output depends on it."""

import itertools
from math import inf, isfinite, log, nan, prod

import pytest
import torch
from says import says
from simulated import CPU, TABLES, Drafting, Skill, auto, fixed
from test_engine import Case, engine_of, outcome

from kdtree import Costs, OracleConfig, SamplingParams, ops
from kdtree.budget import AutoBudget
from kdtree.calibration import Calibration
from kdtree.costs import sizes_up_to
from kdtree.policy import Policy
from kdtree.state import State
from kdtree.tree import TokenTree

SKILLS = {
    "good": Skill(0.85),
    "fair": Skill(0.6),
    "poor": Skill(0.25, sibling=0.05),
    "nil": Skill(0.02, sibling=0.01, below=0.01),
}


def expected_of(calibration: Calibration, tree: TokenTree) -> list[float]:
    """Tokens of a round with its first n + 1 nodes."""
    one = torch.ones(1)
    factor = torch.tensor(calibration.factor()).view(-1, 3)
    parts = tree.parent, tree.depth, tree.score, factor, one.int(), one
    return ops.tree_choose(*parts)[1].tolist()


def running(sequences=1) -> State:
    state = State(sequences, 64, CPU)
    for b in range(sequences):
        state.start(b, [1], SamplingParams(), [])
    return state


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("sequences", [1, 3])
def test_chooses_what_trying_every_size_finds(table, sequences):
    """Before anything is known the drafter is believed: tokens = 1 + the nodes' probabilities."""
    costs, chosen = TABLES[table], set()
    for spread, draft in itertools.product((0.1, 0.3, 0.6, 0.9, 0.99), (0.0, 0.2, 2.0)):
        claims = (spread, *((1 - spread) * 0.5**i for i in range(1, 6)))
        drafter = Drafting(Skill(0.5, claims=claims), 64, False, sequences)
        budget = AutoBudget(drafter, Costs(costs, draft))
        state = running(sequences)
        full = Drafting(drafter.skill, 64, False, sequences).propose(state)
        brought = {n: float(full.score[:, :n].exp().sum()) for n in costs}  # the root's is 1
        rate = {n: brought[n] / (draft + costs[n]) for n in costs}
        budget.plan(state)
        got = budget.propose(state).token.shape[1]
        best = max(costs, key=rate.get)
        assert got == (2 if best == 1 else best)  # the first round looks at one node at least
        chosen.add(best)
    assert chosen == {8} if table == "cliff" else len(chosen) > 1


def test_the_first_nodes_are_the_smaller_tree(rng):
    for shape in ((3, 6, 5), (3, 6, 5, 5)):
        score = torch.randn(shape, generator=rng) - 1
        candidate = torch.randint(9, shape[:3], generator=rng)
        root = torch.tensor([1, 2, 3])
        largest = TokenTree.build(score, candidate, root, 63, False)
        for size in sizes_up_to(64):
            want, got = (
                TokenTree.build(score, candidate, root, size - 1, False),
                largest.first(size),
            )
            for name in ("token", "parent", "depth", "ancestors", "score"):
                assert torch.equal(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("skill", ["good", "fair", "nil"])
def test_learns_how_often_drafts_come_true(skill, sequences):
    """Expected tokens a round approach the true mean, and those by kind the true chances."""
    skill = SKILLS[skill]
    flat = {1: 1.0, 64: 1.0001}  # always the largest tree
    run = auto(skill, flat, 0.0, sequences=sequences).run(600, skill)
    before = run.tokens
    calibration = run.drafter.policy.calibration
    expected = []
    for _ in range(300):
        tree = run.drafter.drafter.propose(run.state)
        expected.append(expected_of(calibration, tree)[-1])
        run.run(1, skill)
    drawn = (run.tokens - before) / 300
    assert sum(expected) / 300 == pytest.approx(drawn, rel=0.08)
    factor = calibration.factor()[:3]
    claim = torch.tensor(skill.claims)
    assert float(factor[0] * claim[0]) == pytest.approx(skill.chance(1, 0, True), rel=0.3, abs=0.06)
    claimed = float(factor[1] * claim[1:].sum())
    assert claimed == pytest.approx(skill.chance(1, 1, True), rel=0.5, abs=0.05)


def test_counts_by_depth_and_kind():
    """One tree: 0 - 1 - 3, and 0 - 2 - 4. Spine 1, 3; beside it 2; below that 4."""
    tree = TokenTree(
        token=torch.tensor([[9, 1, 2, 3, 4, 0]]),
        parent=torch.tensor([[-1, 0, 0, 1, 2, -2]], dtype=torch.int32),
        depth=torch.tensor([[0, 1, 1, 2, 2, 0]], dtype=torch.int32),
        ancestors=torch.tensor([[1, 3, 5, 11, 21, 0]]),
        score=torch.tensor([[1, 0.5, 0.25, 0.2, 0.05, 0]]).log(),
    )

    calibration, nodes = Calibration(), (tree.parent.tolist(), tree.score.tolist())
    assert expected_of(calibration, tree) == pytest.approx([1, 1.5, 1.75, 1.95, 2.0, 2.0])
    path = [[0, 2, -1]]
    calibration.observe(*nodes, path)
    assert calibration.claimed[:6] == pytest.approx([0.5, 0.25, 0, 0, 0, 0.2])
    assert calibration.accepted[:6] == [0, 1, 0, 0, 0, 0]
    first = tree.first(3)  # node 4 was not verified: no more is known of it
    calibration.observe(first.parent.tolist(), first.score.tolist(), path)
    assert calibration.claimed[5] == pytest.approx(0.2 * (1 - 0.002))
    for broken in nan, -inf:  # says nothing of its node, and spoils nothing
        before = calibration.factor()
        calibration.observe([[-1, 0, 1]], [[0.0, broken, broken]], [[0, 1, 2]])
        assert all(map(isfinite, calibration.factor())) and calibration.factor() != before


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("skill", SKILLS)
def test_hardly_slower_than_plain_decoding_or_a_chain(skill, table, ahead):
    """At most 3 % behind the better of both, over five texts of about 128 tokens."""
    skill, costs = SKILLS[skill], TABLES[table]
    for share in (0.1, 0.4):
        draft = share * costs[1]
        run = auto(skill, costs, draft, ahead=ahead)
        for _ in range(5):
            run.drafter.start(0, 0, [1])
            while run.tokens < 128 * (1 + _):
                run.run(1, skill)
        chain = fixed(skill, costs, draft, 8, chain=True).run(600, skill).speed
        assert run.speed > 0.97 * max(1 / costs[1], chain)


def test_drafts_no_more_where_nothing_pays_and_again_where_it_does():
    costs, skill = TABLES["experts"], SKILLS["nil"]
    run = auto(skill, costs, 0.1).run(400, skill)
    assert run.drafter.drafter.drafts < 20 and run.sizes.count(1) > 380
    assert sum(run.drafter.chosen.values()) == 400
    run.run(900, SKILLS["good"])  # the same text turns easy: found out by the next trials
    assert run.sizes[-100:].count(1) == 0
    run = auto(skill, costs, 0.1).run(400, skill)
    run.drafter.start(0, 0, [1])
    run.run(200, SKILLS["good"])  # a new text is tried at once, and again soon where that is news
    assert run.sizes[400] > 1 and run.sizes[-20:].count(1) == 0


@pytest.mark.parametrize("sequences", [1, 3])
def test_what_a_draft_promised_is_of_what_was_taken(sequences, monkeypatch):
    """Of one node, that node's; of the drafter's whole tree, all that is expected."""
    run = auto(SKILLS["poor"], {1: 1.0, 2: 1.35, 64: 3.0}, 0.1, sequences=sequences)
    policy, drafts, learnt = run.drafter.policy, [], []
    monkeypatch.setattr(policy, "drafts", lambda: True)
    monkeypatch.setattr(policy, "learn", lambda *given, **of: learnt.append((*given, of)))
    take = run.drafter.take
    monkeypatch.setattr(
        run.drafter, "take", lambda drafted, size: (drafts.append(drafted), take(drafted, size))
    )
    run.run(40, SKILLS["poor"])
    for drafted, (size, brought, of) in zip(drafts, learnt, strict=True):
        expected = drafted.expected.tolist()
        assert of == {"promised": expected[size - 1], "plain": expected[0]}
        assert sequences <= brought <= 8 * sequences and expected[0] == sequences
    sizes = {size for size, *_ in learnt}
    assert 1 in sizes and len(sizes) > 1


def test_gains_are_kept_apart_by_how_sure_the_model_is():
    """Text that the model is sure of is drafted at once, whatever drafts lost elsewhere."""
    policy = Policy(Costs({1: 1.0, 8: 1.2}, 0.8), 8, timed=False)
    chain = [list(range(-1, 7))], [[0.0] * 8]  # parents and scores

    def rounds(count, chance, right):
        """Of them with a draft; every token of the model's with this chance."""
        drafts = 0
        for _ in range(count):
            brought = 1
            if policy.drafts():
                brought = 1 + 7 * right
                path = [[*range(brought), *[-1] * (8 - brought)]]
                promised = 1 + 7 * prod(policy.calibration.factor()[: 7 * 3 : 3])
                policy.calibration.observe(*chain, path)
                policy.learn(8, brought, promised, 1.0)
                drafts += 1
            policy.see([[log(chance)] * brought])
        return drafts

    assert rounds(200, 0.3, right=0) < 20
    assert rounds(50, 0.95, right=1) > 40
    assert rounds(50, 0.3, right=0) < 20
    assert rounds(20, 0.95, right=1) >= 15  # it takes some tokens to see
    policy.see([[float("nan")], []])
    assert policy.drafts()


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_sampled_text_shows_says_nothing_of_greedy(ahead):
    """Drafts come true in greedy texts and not in sampled ones: each is known from the last."""
    run = auto(SKILLS["good"], TABLES["experts"], 0.4, ahead=ahead)
    plain = {False: 0, True: 0}  # rounds of three texts each
    for text in range(8):
        sampled = bool(text % 2)
        run.state.sampling.temperature.fill_(sampled)
        run.drafter.start(0, text, [1])
        run.run(60, SKILLS["nil" if sampled else "good"])
        if text >= 2:
            plain[sampled] += run.sizes[-60:].count(1)
    assert plain[True] > 165 and plain[False] < 30


def test_what_other_texts_gained_is_soon_forgotten():
    """Fifteen drafts, where sixteen good ones before would take twenty-two to forget."""
    run = auto(SKILLS["good"], TABLES["experts"], 0.2).run(200, SKILLS["good"])
    before = run.drafter.drafter.drafts
    run.drafter.start(0, 0, [1])
    run.run(60, SKILLS["nil"])
    assert run.drafter.drafter.drafts - before < 18


def test_a_drafter_with_nothing_to_say_costs_little():
    """And is asked again: what its draft costs is all that it may lose."""
    skill, costs = SKILLS["good"], TABLES["cliff"]
    run = auto(skill, costs, 0.1)
    spoken, run.drafter.drafter.skill = skill.claims, Skill(0.85, claims=(0.0,) * 4)
    run.run(300, skill)
    assert 20 < run.drafter.drafter.drafts < 40
    run.drafter.drafter.skill = Skill(0.85, claims=spoken)
    run.run(40, skill)
    assert run.sizes[-30:].count(1) == 0


def test_no_sequence_running(device):
    state = State(2, 64, CPU)
    budget = AutoBudget(Drafting(Skill(0.5), 64, False, 2), Costs(TABLES["experts"], 0.1))
    for _ in range(5):
        budget.plan(state)
        tree = budget.propose(state)
        assert (tree.parent == -2).all()


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("number", range(4))
def test_outputs_do_not_depend_on_the_choice(number, table, device):
    case = Case(number)
    plain = engine_of(case.name, device, "float32")
    want = plain.generate(case.prompts, case.params)
    truth = [r.prompt_token_ids + r.token_ids for r in want]
    costs = Costs(TABLES[table], 0.1)
    drafters = case.drafters(truth)
    for name in ("noisy", "wrong", "ngram", "scored"):
        options = {"tree": case.rng.choice(["best-first", "chain"])}
        options["chain_seed"] = case.rng.random() < 0.5
        drafter = drafters[name]
        engine = engine_of(
            case.name, device, "float32", drafter, case.batch, budget=costs, **options
        )
        got = engine.generate(case.prompts, case.params)
        assert outcome(got) == outcome(want), name
        assert sum(engine.drafter.chosen.values()) > 0


def test_nothing_to_choose(device):
    assert not isinstance(engine_of("base", device, "float32").drafter, AutoBudget)
    fixed = engine_of("base", device, "float32", "ngram", budget=7)
    assert not isinstance(fixed.drafter, AutoBudget)
    one = OracleConfig(((1,),), budget=0)
    assert not isinstance(engine_of("base", device, "float32", one).drafter, AutoBudget)


@pytest.mark.parametrize(
    "rounds, draft, message",
    [
        ({2: 1.0}, 0.0, ["rounds has the sizes [2], wants 1 among them"]),
        ({1: 1.0, 65: 2.0}, 0.0, ["rounds is 65, wants 1 to 64"]),
        ({1: 0.0}, 0.0, ["rounds[1] is 0.0, wants a finite number above 0"]),
        ({1: 1.0, 8: float("nan")}, 0.0, ["rounds[8] is nan"]),
        ({1: 1.0}, -1.0, ["draft is -1.0, wants a finite number of at least 0"]),
    ],
)
def test_refuses_costs_that_are_none(rounds, draft, message):
    with says(ValueError, *message):
        Costs(rounds, draft)


def test_refuses_costs_without_a_size_to_choose():
    with says(ValueError, "rounds has the sizes [1, 9], wants one from 2 to the 8 nodes"):
        AutoBudget(Drafting(Skill(0.5), 8, False), Costs({1: 1.0, 9: 2.0}))
