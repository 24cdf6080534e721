import numpy as np
import pytest
import torch
from says import says
from torch.library import opcheck

from kdtree import ops
from kdtree.tree import TokenTree

INF = float("inf")


def tensors(parent, depth, score, factor, sizes, seconds, device):
    dtypes = (torch.int32, torch.int32, torch.float32, torch.float32, torch.int32, torch.float32)
    columns = (parent, depth, score, factor, sizes, seconds)
    return [torch.as_tensor(c).to(t).to(device) for c, t in zip(columns, dtypes, strict=True)]


def expected_ref(parent, depth, score, factor):
    """One sequence's, node by node, in float64: what the first n + 1 nodes bring."""
    chance, kind, brought = [], [], []
    for n, above in enumerate(parent):
        first = above >= 0 and above not in parent[:n]
        if above < 0:
            chance.append(float(above == -1))
            kind.append(0)
        else:
            kind.append((0 if first else 1) if kind[above] == 0 else 2)
            own = np.exp(min(score[n] - score[above], 0)) * factor[depth[n] - 1, kind[n]]
            chance.append(chance[above] * min(own, 1))
        brought.append(sum(chance))
    return brought


def drawn(B, J, M, N, rng):
    """Trees as drafters make them, of some padding; and numbers of a calibration."""
    score = torch.randn(B, J, M, generator=rng) - 1
    candidate = torch.randint(9, (B, J, M), generator=rng)
    active = torch.arange(B) != 1
    tree = TokenTree.build(score, candidate, torch.arange(B), N - 1, False, active)
    factor = 0.3 + torch.rand(15, 3, generator=rng)
    return tree.parent, tree.depth, tree.score, factor


@pytest.mark.parametrize("B, J, M, N", [(1, 1, 1, 1), (1, 15, 3, 64), (3, 7, 4, 33), (5, 2, 2, 12)])
def test_matches_each_node_alone(B, J, M, N, device, rng):
    tree = drawn(B, J, M, N, rng)
    sizes = [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if n <= N]
    seconds = 0.5 + torch.rand(len(sizes), generator=rng)
    choice, expected = ops.tree_choose(*tensors(*tree, sizes, seconds, device))
    parent, depth, score, factor = (x.double().numpy() for x in tree)
    parent, depth = parent.astype(int), depth.astype(int)
    each = [expected_ref(list(parent[b]), depth[b], score[b], factor) for b in range(B)]
    want = np.sum(each, 0)
    np.testing.assert_allclose(expected.cpu(), want, rtol=1e-5)
    rate = want[np.array(sizes) - 1] / seconds.numpy()
    assert int(choice) == rate.argmax()


@pytest.mark.parametrize(
    "chances, seconds, size",
    [
        ([0.2, 0.15, 0.15, 3.5], [1, 1, 2, 3, 4], 16),
        ([1, 0, 0, 0], [1, 1, 2, 2, 2], 2),
        ([0.1] * 4, [1, 2, 2, 2, 2], 1),
        ([0.1] * 4, [INF, 2, 2, 2, 2], 16),
        ([1, 1, 0, 0], [1, 1, 1, 1, 1], 4),
        ([1, 1, 1, 1], [1, INF, INF, 1, INF], 8),
    ],
)
def test_looks_at_every_size(chances, seconds, size, device):
    """Beyond a dip; the first of equals. chances: tokens that 1, 2, 4 and 8 more nodes bring"""
    sizes, more = [1, 2, 4, 8, 16], [1, 2, 4, 8]
    each = [c / m for c, m in zip(chances, more, strict=True) for _ in range(m)]
    with np.errstate(divide="ignore"):
        score = np.log([[1, *each]])
    parent, depth = [[-1] + [0] * 15], [[0] + [1] * 15]
    parts = parent, depth, score, np.ones((15, 3)), sizes, seconds
    choice, expected = ops.tree_choose(*tensors(*parts, device))
    assert sizes[int(choice)] == size
    assert float(expected[-1]) == pytest.approx(1 + sum(chances))


def test_a_kind_is_of_the_path(device):
    """0 - 1 - 3 - 5, 0 - 2 - 4 - 6, and 7 beside 6: what each takes its factor from."""
    parent = [[-1, 0, 0, 1, 2, 3, 4, 4]]
    depth = [[0, 1, 1, 2, 2, 3, 3, 3]]
    factor = np.zeros((15, 3))
    factor[0] = 0.5, 0.25, 9  # depth 1: spine, beside it, and what there is none of
    factor[1] = 0.1, 9, 0.2
    factor[2] = 0.7, 9, 0.3
    parts = parent, depth, [[0.0] * 8], factor, [8], [1.0]
    _, expected = ops.tree_choose(*tensors(*parts, device))
    each = [1, 0.5, 0.25, 0.05, 0.05, 0.035, 0.015, 0.015]
    np.testing.assert_allclose(expected.cpu(), np.cumsum(each), rtol=1e-6)


def test_chances_end_at_one(device):
    """A factor over 1, and a score above the parent's."""
    parts = [[-1, 0]], [[0, 1]], [[0.0, 0.5]], np.full((15, 3), 7.0), [1, 2], [1.0, 1.9]
    choice, expected = ops.tree_choose(*tensors(*parts, device))
    assert expected.tolist() == [1, 2] and int(choice) == 1


def test_nothing_to_choose_by(device):
    """No sequence runs, or no size may be taken: the first."""
    parts = [[-2, -2]], [[0, 0]], [[-INF, -INF]], np.ones((15, 3)), [1, 2]
    assert int(ops.tree_choose(*tensors(*parts, [1.0, 1.0], device))[0]) == 0
    parts = [[-1, 0]], [[0, 1]], [[0.0, 0.0]], np.ones((15, 3)), [1, 2]
    assert int(ops.tree_choose(*tensors(*parts, [INF, INF], device))[0]) == 0


def test_malformed_trees_end(device):
    """Parents above their nodes, cycles, parents and depths out of range: any choice, no crash."""
    N = 64
    for parent in (np.arange(N), np.arange(N) + 1, np.full(N, 2**31 - 1), np.full(N, -(2**31))):
        depth, score = np.full(N, 2**30), np.zeros(N)
        parts = parent[None], depth[None], score[None], np.ones((15, 3)), [0, 2**20], [1.0, 1.0]
        choice, _ = ops.tree_choose(*tensors(*parts, device))
        assert int(choice) in (0, 1)


def test_registration(device, rng):
    tree = drawn(2, 4, 3, 12, rng)
    args = tensors(*tree, [1, 4, 12], [1.0, 1.2, 2.0], device)
    opcheck(torch.ops.kdtree.tree_choose, args)


def test_rejects_bad_arguments(device, rng):
    args = tensors(*drawn(2, 4, 3, 12, rng), [1, 4, 12], [1.0, 1.2, 2.0], device)

    def call(**changed):
        names = ("parent", "depth", "score", "factor", "sizes", "seconds")
        ops.tree_choose(*({**dict(zip(names, args, strict=True)), **changed}[n] for n in names))

    with says(RuntimeError, "depth has shape [2, 11], wants [2, 12]"):
        call(depth=args[1][:, :11])
    with says(RuntimeError, "score has dtype Int, wants Float"):
        call(score=args[0])
    with says(RuntimeError, "factor has shape [15], wants [15, 3]"):
        call(factor=args[3][:, 0])
    with says(RuntimeError, "seconds has shape [2], wants [3]"):
        call(seconds=args[5][:2])
    with says(RuntimeError, "sizes has 0 of them, wants 1 to 64"):
        call(sizes=args[4][:0])
    with says(RuntimeError, "parent has 0 nodes, wants 1 to 64"):
        call(parent=args[0][:, :0])
