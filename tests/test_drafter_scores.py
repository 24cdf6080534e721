"""The fitted scores of a drafter, and what a simulation says that they are worth."""

import torch
from demo_training.drafter_judge import accepted, rounds
from demo_training.drafter_scores import (
    Candidates,
    Drafted,
    Law,
    Tables,
    bigram_table,
    edge_scores,
    fit_edges,
    fit_law,
    raw_edges,
)

from kdtree.tree import TokenTree


def blocks(rng, n: int, words: int, temperatures=(0.0, 0.7, 1.0)) -> Drafted:
    """Blocks whose tokens follow a known law: a 1.3, b 0.8, c 0.2 at every depth."""
    t = torch.tensor(temperatures).repeat(n)
    lq = (torch.randn(len(t), 2, words, generator=rng) * 2).log_softmax(-1)
    noise = -(-torch.rand(lq.shape, generator=rng).log()).log()
    law = Law(*(torch.full((2,), x) for x in (1.3, 0.8, 0.2, 0.0, 0.0)))
    p = law.x(lq, noise, t).softmax(-1)
    token = torch.multinomial(p.flatten(0, 1), 1, generator=rng).view(-1, 2)
    u = torch.randn(len(t), 2, 4, generator=rng)
    return Drafted(lq, noise, u, torch.zeros_like(token[:, 0]), token, t)


def test_fit_recovers_the_law(rng):
    law = fit_law(blocks(rng, 6000, 16), "law")
    for got, want in ((law.a, 1.3), (law.b, 0.8), (law.c, 0.2)):
        assert (got - want).abs().max() < 0.08, got
    cold = fit_law(blocks(rng, 4000, 16, (0.0,)), "sharpen")
    assert (cold.a - 1.3).abs().max() < 0.08 and cold.b.eq(0).all()


def test_fit_recovers_the_edges_weight(rng):
    """Tokens drawn with 0.7 of the selector's edge."""
    d, words = blocks(rng, 4000, 16), 16
    law = Law(*(torch.full((2,), x) for x in (1.3, 0.8, 0.2, 0.7, 0.0)))
    tables = Tables(
        torch.randn(words, 4, generator=rng),
        torch.randn(words, 4, generator=rng),
        bigram_table(torch.randint(words, (4000,), generator=rng), words),
    )
    before = d.root
    for j in range(2):
        e = (tables.before[before] * d.u[:, j]) @ tables.after.T
        x = (1.3 * (d.lq[:, j] + 0.7 * e) + 0.8 * d.temperature[:, None] * d.noise[:, j]) / (
            1 + 0.2 * d.temperature[:, None]
        )
        before = torch.multinomial(x.softmax(-1), 1, generator=rng)[:, 0]
        d.token[:, j] = before
    found = fit_edges(d, law, tables, words, "selector")
    assert (found.selector - 0.7).abs().max() < 0.05 and found.bigram.eq(0).all()
    both = fit_edges(d, law, tables, words, "both")
    assert (both.selector - 0.7).abs().max() < 0.05 and both.bigram[0] == 0


def test_bigram_edges_favour_what_the_predecessor_foretells():
    data = torch.tensor([0, 1, 2, 3] * 500)
    table = bigram_table(data, 4)
    assert table.exp().sum(1).sub(1).abs().max() < 1e-5
    lq = torch.full((1, 2, 4), 0.25).log()
    d = Drafted(lq, lq * 0, torch.zeros(1, 2, 4), torch.tensor([0]), torch.tensor([[1, 2]]),
                torch.zeros(1))  # fmt: skip
    c = Candidates.best(d, Law.plain(2, lq.device), 4)
    zero = torch.zeros(4, 4)
    before = torch.cat((d.root[:, None, None].expand(-1, 1, 4), c.id[:, :-1]), 1)
    selector, bigram = raw_edges(d, c, Tables(zero, zero, table), before)
    assert selector.eq(0).all() and bigram[:, 0].eq(0).all()
    told = bigram[0, 1].argmax(-1)
    assert (c.id[0, 1, told] == (c.id[0, 0] + 1) % 4).all()


def test_edges_keep_the_candidates_mass(rng):
    d = blocks(rng, 5, 16)
    law = Law(*(torch.full((2,), x) for x in (1.3, 0.8, 0.2, 0.7, 0.5)))
    c = Candidates.best(d, law, 6)
    e = torch.randn(len(d.token), 2, 6, 6, generator=rng)
    got = edge_scores(law, c, d.temperature, e, e * 0.5).exp().sum(-1)
    assert (got - c.score.exp().sum(-1)[..., None]).abs().max() < 1e-5
    x = law.x(d.lq, d.noise, d.temperature).log_softmax(-1)
    assert (c.score - x.gather(-1, c.id)).abs().max() < 1e-5


def test_simulated_acceptance_is_the_real_tree_s(rng):
    """Against the package's own best-first trees, built from edges, walked along the tokens."""
    n, slots, m = 40, 5, 8
    ids = torch.stack([torch.randperm(30, generator=rng)[:m] for _ in range(n * slots)])
    ids = ids.view(n, slots, m)
    edges = (torch.randn(n, slots, m, m, generator=rng) * 2).log_softmax(-1)
    edges[:, 0] = edges[:, 0, :1]
    score = edges[:, :, 0]
    token = ids[torch.arange(n)[:, None], torch.arange(slots), torch.randint(3, (n, slots))]
    token[::5, 2] = 99  # no candidate
    got = accepted(Candidates(ids, score, score, score), edges, token)
    root = torch.zeros(n, dtype=torch.int64)
    for budget in (7, 15, 31, 63):
        tree = TokenTree.build(edges, ids, root, budget, False)
        for b in range(n):
            node, depth = 0, 0
            while depth < slots:
                children = [
                    k for k in range(budget + 1)
                    if int(tree.parent[b, k]) == node and tree.token[b, k] == token[b, depth]
                ]  # fmt: skip
                if not children:
                    break
                node, depth = children[0], depth + 1
            assert depth == int(got[f"tree {budget}"][b]), (budget, b)
    assert (got["tree 63"] > 0).any() and (got["chain"] <= got["tree 63"]).all()


def test_rounds_follow_what_was_accepted():
    tokens, count = rounds(torch.tensor([[2, 0, 0, 1, 7], [0, 0, 0, 0, 0]]))
    assert tokens.tolist() == [5, 5] and count.tolist() == [2, 5]
