import numpy as np
import pytest
import torch
from torch.library import opcheck

from kdtree import ops


def tensors(token, parent, target, finite, device):
    """The op's arguments; a node's log-probability is made of its number and its sequence's."""
    dtypes = (torch.int64, torch.int32, torch.int64, torch.bool, torch.float32)
    rows, nodes = np.shape(token)
    logprob = np.arange(rows)[:, None] - np.arange(nodes) / 64
    columns = (token, parent, target, finite, logprob)
    return [torch.as_tensor(c, dtype=t).to(device) for c, t in zip(columns, dtypes, strict=True)]


def accept_ref(token, parent, target, finite):
    """One sequence's walk: nodes, emitted tokens, failed."""
    path, tokens, node = [], [], 0 if parent[0] != -2 else None
    while node is not None and len(path) < min(len(token), 16):
        if not finite[node]:
            return path, tokens, True
        path.append(node)
        tokens.append(int(target[node]))
        wanted = target[node]
        matches = [
            n
            for n in range(node + 1, len(token))
            if parent[n] == node and token[n] == wanted and wanted >= 0
        ]
        node = matches[0] if matches else None
    return path, tokens, False


def check(token, parent, target, finite, device):
    got = ops.tree_accept(*tensors(token, parent, target, finite, device))
    path, length, tokens, logprob, failed = (x.cpu().tolist() for x in got)
    J = min(len(token[0]), 16)
    for b in range(len(token)):
        nodes, emitted, fails = accept_ref(token[b], parent[b], target[b], finite[b])
        pad = [-1] * (J - len(nodes))
        assert path[b] == nodes + pad and tokens[b] == emitted + pad, f"sequence {b}"
        assert length[b] == len(nodes) and failed[b] == fails, f"sequence {b}"
        assert logprob[b] == [b - n / 64 for n in nodes] + [0] * len(pad), f"sequence {b}"
    return path, length, tokens, failed


def random_tree(N, words, rng):
    """A tree of few words, so that walks go deep and siblings repeat; padded at the end."""
    parent = np.array([-1] + [rng.integers(max(0, n - 4), n) for n in range(1, N)])
    parent[N - rng.integers(0, N // 3 + 1) :] = -2
    finite = rng.random(N) > 0.05
    return rng.integers(0, words, N), parent, rng.integers(0, words, N), finite


@pytest.mark.parametrize("B, N", [(1, 1), (2, 2), (5, 17), (3, 32), (7, 33), (40, 64)])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_matches_walk(B, N, words, device):
    rng = np.random.default_rng(N * words)
    columns = zip(*(random_tree(N, words, rng) for _ in range(B)), strict=True)
    check(*(np.stack(c) for c in columns), device)


def test_walk_by_hand(device):
    token = [[9, 4, 5, 6, 7, 5]]
    parent = [[-1, 0, 0, 2, 3, 0]]
    target = [[5, 8, 6, 1, 8, 8]]  # root -> node 2, the earlier of two 5 -> node 3, then a bonus
    got = check(token, parent, target, [[True] * 6], device)
    assert got == ([[0, 2, 3, -1, -1, -1]], [3], [[5, 6, 1, -1, -1, -1]], [False])


def test_failure_ends_the_walk_before_the_node(device):
    token, parent = [[9, 4, 5]] * 4, [[-1, 0, 1]] * 4
    target = [[4, 5, 6], [4, 5, 6], [-1, 5, 6], [7, -1, 6]]
    finite = [[True, True, False], [True, False, True], [False, True, True], [True, False, True]]
    _, length, _, failed = check(token, parent, target, finite, device)
    assert length == [2, 1, 0, 1] and failed == [True, True, True, False]


def test_padding_is_never_accepted(device):
    """Padded nodes carry the wanted token; padded sequences are not finite and not failed."""
    token = [[9, 0, 0], [0, 0, 0], [9, -1, 0]]
    parent = [[-1, -2, -2], [-2, 0, 1], [-1, 0, -2]]
    target = [[0, 0, 0], [0, 0, 0], [-1, -1, -1]]  # token -1 is no child, whatever a node carries
    finite = [[True, True, True], [False, True, True], [True, True, True]]
    got = check(token, parent, target, finite, device)
    assert got[1] == [1, 0, 1] and got[3] == [False] * 3


def test_malformed_trees_end(device):
    """Parents above their nodes, cycles, parents out of range, a chain deeper than the op goes."""
    N = 64
    parent = np.stack(
        [
            np.arange(N),
            np.arange(N) + 1,
            (np.arange(N) + N // 2) % N,
            np.full(N, 2**31 - 1),
            np.full(N, -(2**31)),
            np.arange(N) - 1,
            np.full(N, -2),
        ]
    )
    parent[:, 0] = -1
    parent[6, [1, 2]] = [2, 0]  # root -> 2, and 1 claims to be a child of 2
    same, finite = np.zeros_like(parent), np.ones_like(parent, dtype=bool)
    _, length, _, _ = check(same, parent, same, finite, device)
    assert length == [1, 1, 2, 1, 1, 16, 2]  # 0 is a fair parent of 32


def test_sequences_are_independent(device):
    rng = np.random.default_rng(3)
    columns = zip(*(random_tree(24, 2, rng) for _ in range(5)), strict=True)
    args = tensors(*(np.stack(c) for c in columns), device)
    whole = ops.tree_accept(*args)
    for b in range(5):
        alone = ops.tree_accept(*(x[b : b + 1] for x in args))
        for got, want in zip(alone, whole, strict=True):
            assert torch.equal(got[0], want[b])


def test_no_sequences(device):
    empty = np.zeros((0, 20))
    got = ops.tree_accept(*tensors(empty, empty, empty, empty, device))
    assert [x.shape for x in got] == [(0, 16), (0,), (0, 16), (0, 16), (0,)]


def test_registration(device):
    rng = np.random.default_rng(0)
    args = tensors(*(c[None] for c in random_tree(20, 2, rng)), device)
    opcheck(torch.ops.kdtree.tree_accept, args)


def test_rejects_bad_arguments(device):
    token, parent, target, *others = tensors(*[np.zeros((2, 4))] * 4, device)
    finite, logprob = others
    with pytest.raises(RuntimeError, match="parent has dtype Long, wants Int"):
        ops.tree_accept(token, parent.long(), target, *others)
    with pytest.raises(RuntimeError, match=r"target has shape \[2, 3\], wants \[2, 4\]"):
        ops.tree_accept(token, parent, target[:, :3], *others)
    with pytest.raises(RuntimeError, match="finite has dtype Byte, wants Bool"):
        ops.tree_accept(token, parent, target, finite.byte(), logprob)
    with pytest.raises(RuntimeError, match="logprob has dtype Double, wants Float"):
        ops.tree_accept(token, parent, target, finite, logprob.double())
    with pytest.raises(RuntimeError, match="token must be contiguous"):
        ops.tree_accept(token.T.contiguous().T, parent, target, *others)
    with pytest.raises(RuntimeError, match="token has 0 nodes, wants 1 to 64"):
        ops.tree_accept(token[:, :0], parent, target, *others)
    big = tensors(*[np.zeros((1, 65))] * 4, device)
    with pytest.raises(RuntimeError, match="token has 65 nodes, wants 1 to 64"):
        ops.tree_accept(*big)
