import heapq
import itertools

import numpy as np
import pytest
import torch
from torch.library import opcheck

from kdtree import ops

F32 = np.float32
PADDING = (0, -2, 0, 0, F32(-np.inf))


def tree_ref(score, candidate, root, budget, chain_seed):
    """One sequence's tree by the heap: rows of token, parent, depth, ancestors, score."""
    J, M = candidate.shape
    nodes = [(int(root), -1, 0, 1, F32(0))]
    places = [0]  # of each node among its depth's candidates

    def children(n):
        depth, above = nodes[n][2], nodes[n][4]
        if depth == J:
            return []
        row = score[depth] if score.ndim == 2 else score[depth, places[n]]
        sums = [(m, F32(above + min(s, F32(0)))) for m, s in enumerate(row) if not np.isnan(s)]
        return [(-s, depth + 1, n, m) for m, s in sums if s > -np.inf]

    def take(child):
        negative, depth, parent, m = child
        ancestors = nodes[parent][3] | 1 << len(nodes)
        nodes.append((int(candidate[depth - 1, m]), parent, depth, ancestors, F32(-negative)))
        places.append(m)
        return children(len(nodes) - 1)

    heap, opened = [], children(0)
    while chain_seed and opened and len(nodes) <= budget:
        best = min(opened)
        heap += [c for c in opened if c != best]
        opened = take(best)
    heap += opened
    heapq.heapify(heap)
    while heap and len(nodes) <= budget:
        for child in take(heapq.heappop(heap)):
            heapq.heappush(heap, child)
    return nodes + [PADDING] * (budget + 1 - len(nodes))


def bits(rows):
    """Comparable columns: the score as its bits, ancestors as a signed word."""
    token, parent, depth, ancestors, score = (list(c) for c in zip(*rows, strict=True))
    ancestors = np.array(ancestors, dtype=np.uint64).view(np.int64).tolist()
    return token, parent, depth, ancestors, np.array(score, dtype=F32).view(np.int32).tolist()


def check(score, candidate, root, budget, chain_seed, device):
    got = ops.tree_build(
        score.to(device), candidate.to(device), root.to(device), budget, chain_seed
    )
    token, parent, depth, ancestors, node_score = (x.cpu() for x in got)
    for b in range(score.shape[0]):
        want = tree_ref(score[b].numpy(), candidate[b].numpy(), root[b], budget, chain_seed)
        score_bits = node_score[b].numpy().view(np.int32).tolist()
        rows = (x[b].tolist() for x in (token, parent, depth, ancestors))
        assert (*rows, score_bits) == bits(want), f"sequence {b}"
    return got


def case(B, J, M, edges, rng, spread=3.0):
    shape = (B, J, M, M) if edges else (B, J, M)
    score = (torch.randn(shape, generator=rng) * spread).log_softmax(-1)
    candidate = torch.randint(0, 163840, (B, J, M), generator=rng)
    return score, candidate, torch.randint(0, 163840, (B,), generator=rng)


@pytest.mark.parametrize("chain_seed", [False, True])
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(
    "B, J, M, budget",
    [(1, 1, 1, 0), (2, 1, 1, 5), (3, 7, 1, 63), (1, 15, 16, 63), (5, 7, 8, 16), (4, 4, 5, 63)]
    + [(2, 3, 64, 63), (1, 2, 2, 63), (1, 15, 16, 7), (2, 6, 33, 40)],
)
def test_matches_heap(B, J, M, budget, edges, chain_seed, device, rng):
    check(*case(B, J, M, edges, rng), budget, chain_seed, device)


@pytest.mark.large
@pytest.mark.parametrize("M", [24, 25, 64])
def test_matches_heap_at_every_width(M, device, rng):
    """Edge lists that fill the CUDA form's shared memory, and that do not fit."""
    check(*case(1, 15, M, True, rng), 63, False, device)


@pytest.mark.parametrize("chain_seed", [False, True])
@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("step", [0.0, 0.5, 2.0])
def test_ties(step, edges, chain_seed, device, rng):
    """Scores of few values, exact zeros of both signs among them; step 0: nothing but zeros."""
    for J, M in [(5, 7), (15, 16), (2, 64), (1, 40)]:
        score, candidate, root = case(3, J, M, edges, rng)
        score = -torch.randint(0, 3, score.shape, generator=rng).float() * step
        check(score, candidate, root, 63, chain_seed, device)


@pytest.mark.parametrize("edges", [False, True])
def test_sums_that_round_together(edges, device, rng):
    """Candidates that differ in score but not in their parent's sum go by their place: below a
    parent at -1000 a float32 step is 6e-5."""
    for J, M in [(3, 9), (4, 64), (3, 33)]:
        score, candidate, root = case(4, J, M, edges, rng)
        score = -torch.randint(0, 40, score.shape, generator=rng).float() * 4e-6
        score[:, 0] -= 1000
        check(score, candidate, root, 63, False, device)
        check(score, candidate, root, 63, True, device)


@pytest.mark.parametrize("chain_seed", [False, True])
@pytest.mark.parametrize("edges", [False, True])
def test_hostile_scores(edges, chain_seed, device, rng):
    """NaN, both infinities, positive scores and sums that overflow."""
    wild = torch.tensor([np.nan, -np.nan, -np.inf, np.inf, 3.0, -3e38, -0.0, 1e-45, -1e-45])
    for J, M in [(3, 4), (6, 16), (15, 5)]:
        score, candidate, root = case(4, J, M, edges, rng)
        pick = torch.randint(0, 3 * len(wild), score.shape, generator=rng)
        score = torch.where(pick < len(wild), wild[pick % len(wild)], score)
        score[0] = np.nan  # a sequence without a tree
        score[1, J // 2] = -np.inf  # a tree that ends half way
        check(score, candidate, root, 63, chain_seed, device)


def test_edge_form_of_the_root_reads_one_list(device, rng):
    score, candidate, root = case(2, 3, 4, True, rng)
    score[:, 0, 1:] = 0.0  # would win everything
    check(score, candidate, root, 20, False, device)


@pytest.mark.parametrize("J, M, budget", [(3, 2, 5), (2, 3, 6), (4, 2, 4)])
@pytest.mark.parametrize("edges", [False, True])
def test_no_tree_is_more_probable(J, M, budget, edges, device, rng):
    """Against all prefix-closed sets of budget nodes, a node a tuple of candidates."""
    score, candidate, root = case(1, J, M, edges, rng)
    s = score[0].double().numpy()

    def log_probability(node):
        lists = [s[j] if s.ndim == 2 else s[j][node[j - 1] if j else 0] for j in range(len(node))]
        return sum(lists[j][m] for j, m in enumerate(node))

    nodes = [t for j in range(1, J + 1) for t in itertools.product(range(M), repeat=j)]
    mass = {t: np.exp(log_probability(t)) for t in nodes}
    best = max(
        sum(mass[t] for t in chosen)
        for chosen in itertools.combinations(nodes, budget)
        if all(len(t) == 1 or t[:-1] in chosen for t in chosen)
    )
    *_, node_score = check(score, candidate, root, budget, False, device)
    assert node_score[0, 1:].exp().sum().item() == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("edges", [False, True])
def test_tree_is_consistent(edges, device, rng):
    score, candidate, root = case(5, 15, 8, edges, rng)
    token, parent, depth, ancestors, node_score = (
        x.cpu() for x in ops.tree_build(*(x.to(device) for x in (score, candidate, root)), 63, True)
    )
    for b, n in itertools.product(range(5), range(1, 64)):
        p = parent[b, n]
        assert 0 <= p < n and depth[b, n] == depth[b, p] + 1
        assert ancestors[b, n] == ancestors[b, p] | torch.tensor(1) << n
        assert bin(ancestors[b, n].item() & 2**64 - 1).count("1") == depth[b, n] + 1
        assert token[b, n] in candidate[b, depth[b, n] - 1] and node_score[b, n] <= node_score[b, p]
    siblings = list(zip(parent[0, 1:].tolist(), token[0, 1:].tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize("budget", [3, 7, 20])
def test_chain_seed_holds_the_chain(budget, edges, device, rng):
    """Flat scores, whose best-first tree is shallow."""
    score, candidate, root = case(3, 7, 6, edges, rng, spread=0.1)
    tree = ops.tree_build(*(x.to(device) for x in (score, candidate, root)), budget, True)
    token, parent, _, _, _ = (x.cpu() for x in tree)
    for b in range(3):
        place = 0
        for j in range(min(7, budget)):
            row = score[b, j, place] if edges else score[b, j]
            place = int(row.argmax())
            assert parent[b, j + 1] == j and token[b, j + 1] == candidate[b, j, place]


def test_sequences_are_independent(device, rng):
    score, candidate, root = (x.to(device) for x in case(5, 7, 16, True, rng))
    whole = ops.tree_build(score, candidate, root, 31, False)
    for b in range(5):
        alone = ops.tree_build(score[b : b + 1], candidate[b : b + 1], root[b : b + 1], 31, False)
        for got, want in zip(alone, whole, strict=True):
            assert torch.equal(got[0], want[b])


@pytest.mark.parametrize("edges", [False, True])
def test_inactive_sequences_are_padding(edges, device, rng):
    score, candidate, root = (x.to(device) for x in case(5, 4, 6, edges, rng))
    active = torch.tensor([True, False, False, True, False], device=device)
    want = ops.tree_build(score, candidate, root, 20)
    got = ops.tree_build(score, candidate, root, 20, active=active)
    for x, y, padding in zip(got, want, PADDING, strict=True):
        assert torch.equal(x[active], y[active]) and (x[~active] == float(padding)).all()


def test_no_sequences_and_no_candidates(device, rng):
    score, candidate, root = (x.to(device) for x in case(0, 3, 4, False, rng))
    assert [x.shape for x in ops.tree_build(score, candidate, root, 4)] == [(0, 5)] * 5
    check(*case(2, 3, 0, False, rng), 4, True, device)
    check(*case(2, 0, 3, True, rng), 4, False, device)


def test_root_among_the_known_tokens(device, rng):
    score, candidate, root = (x.to(device) for x in case(3, 4, 6, False, rng))
    known = torch.randint(1000, (3, 9), generator=rng).to(device)
    length = torch.tensor([1, 7, 12], dtype=torch.int32, device=device)  # the last taken as 9
    for b, at in enumerate((0, 6, 8)):
        known[b, at] = root[b]
    want = ops.tree_build(score, candidate, root, 20)
    got = ops.tree_build(score, candidate, known, 20, length=length)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("edges", [False, True])
def test_registration(edges, device, rng):
    score, candidate, root = (x.to(device) for x in case(2, 3, 4, edges, rng))
    opcheck(torch.ops.kdtree.tree_build, (score, candidate, root, 8, True, None, None))
    opcheck(torch.ops.kdtree.tree_build, (score, candidate, root, 8, True, root > 0, None))
    known = root[:, None], torch.ones_like(root, dtype=torch.int32)
    opcheck(torch.ops.kdtree.tree_build, (score, candidate, known[0], 8, True, None, known[1]))


def test_rejects_bad_arguments(device, rng):
    score, candidate, root = (x.to(device) for x in case(2, 3, 4, False, rng))
    deep, wide = (
        torch.zeros(s, dtype=torch.int64, device=device) for s in [(1, 16, 2), (1, 2, 65)]
    )
    with pytest.raises(RuntimeError, match="budget is 64, wants 0 to 63"):
        ops.tree_build(score, candidate, root, 64)
    with pytest.raises(RuntimeError, match="budget is -1, wants 0 to 63"):
        ops.tree_build(score, candidate, root, -1)
    with pytest.raises(RuntimeError, match=r"score has shape \[2, 3, 3\], wants \[2, 3, 4\]"):
        ops.tree_build(score[:, :, :3].contiguous(), candidate, root, 4)
    with pytest.raises(RuntimeError, match=r"score has shape .*, wants \[2, 3, 4, 4\]"):
        ops.tree_build(score[..., None], candidate, root, 4)
    with pytest.raises(RuntimeError, match="score has dtype BFloat16, wants Float"):
        ops.tree_build(score.bfloat16(), candidate, root, 4)
    with pytest.raises(RuntimeError, match="candidate has dtype Int, wants Long"):
        ops.tree_build(score, candidate.int(), root, 4)
    with pytest.raises(RuntimeError, match=r"root has shape \[1\], wants \[2\]"):
        ops.tree_build(score, candidate, root[:1], 4)
    with pytest.raises(RuntimeError, match=r"root has shape \[2\], wants \[2, 1\]"):
        ops.tree_build(score, candidate, root, 4, length=root.int())
    with pytest.raises(RuntimeError, match="length has dtype Long, wants Int"):
        ops.tree_build(score, candidate, root[:, None], 4, length=root)
    with pytest.raises(RuntimeError, match="root has room for none"):
        ops.tree_build(score, candidate, root[:, None][:, :0], 4, length=root.int())
    with pytest.raises(RuntimeError, match="active has dtype Long, wants Bool"):
        ops.tree_build(score, candidate, root, 4, active=root)
    with pytest.raises(RuntimeError, match="score must be contiguous"):
        ops.tree_build(score.mT.contiguous().mT, candidate, root, 4)
    with pytest.raises(RuntimeError, match="candidate has depth 16, wants at most 15"):
        ops.tree_build(deep.float(), deep, root[:1], 4)
    with pytest.raises(RuntimeError, match="candidate has width 65, wants at most 64"):
        ops.tree_build(wide.float(), wide, root[:1], 4)
