import pytest
import torch
from torch.library import opcheck

from kdtree import ops

WILD = 2147480000  # a block table's entry that must not be followed


def case(context, N, device, rng):
    """Trees whose last nodes are padding; shuffled pages, and wild spare entries of the table."""
    B, max_pages = len(context), max((s + N) // 64 + 1 for s in context) + 1
    table = torch.full((B, max_pages), WILD, dtype=torch.int32)
    for b, s in enumerate(context):
        used = (s + N - 1) // 64 + 1
        table[b, :used] = torch.randperm(1000, generator=rng)[:used].int()
    depth = torch.randint(0, 16, (B, N), generator=rng, dtype=torch.int32)
    ancestors = torch.randint(1, 2**62, (B, N), generator=rng)
    for b in range(B):
        ancestors[b, N - b % N :] = 0
    args = torch.tensor(context, dtype=torch.int32), table, depth, ancestors
    return [x.to(device) for x in args]


def tree_place_ref(context, table, depth, ancestors):
    """Node by node, in Python."""
    position, slot = torch.full_like(depth, -1), torch.full_like(depth, -1)
    for b in range(len(depth)):
        for n in range(depth.shape[1]):
            if ancestors is None or ancestors[b, n] != 0:
                page, at = divmod(int(context[b]) + n, 64)
                position[b, n] = context[b] + depth[b, n]
                slot[b, n] = table[b, min(page, table.shape[1] - 1)] * 64 + at
    return position, slot


@pytest.mark.parametrize(
    "context, N", [([0], 1), ([63, 0, 64, 1000], 2), ([5, 130, 63, 64, 65], 64), ([100, 7], 300)]
)
@pytest.mark.parametrize("padded", [True, False])
def test_matches_reference(context, N, padded, device, rng):
    args = case(context, N, device, rng)
    if not padded:
        args[3] = None
    got = ops.tree_place(*args)
    want = tree_place_ref(*(x if x is None else x.cpu() for x in args))
    assert all(torch.equal(x.cpu(), y) for x, y in zip(got, want, strict=True))


def test_beyond_the_pages(device):
    """A finished sequence may stand there; no node may read beyond the table."""
    args = [[126]], [[3, 7]], [[0, 1, 2, 3]]
    context, table, depth = (torch.tensor(x, dtype=torch.int32, device=device) for x in args)
    position, slot = ops.tree_place(context[0], table, depth)
    assert position.tolist() == [[126, 127, 128, 129]]
    assert slot.tolist() == [[7 * 64 + 62, 7 * 64 + 63, 7 * 64, 7 * 64 + 1]]


def test_sequences_are_independent(device, rng):
    args = case([5, 200, 63], 9, device, rng)
    whole = ops.tree_place(*args)
    for b in range(3):
        alone = ops.tree_place(*(x[b : b + 1] for x in args))
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, whole, strict=True))


def test_empty(device, rng):
    args = case([5, 200], 9, device, rng)
    assert [x.shape for x in ops.tree_place(*(x[:0] for x in args))] == [(0, 9)] * 2
    context, table, depth, ancestors = args
    got = ops.tree_place(context, table, depth[:, :0], ancestors[:, :0])
    assert [x.shape for x in got] == [(2, 0)] * 2


def test_registration(device, rng):
    args = case([5, 200], 9, device, rng)
    opcheck(torch.ops.kdtree.tree_place, args)
    opcheck(torch.ops.kdtree.tree_place, [*args[:3], None])


def test_rejects_bad_arguments(device, rng):
    context, table, depth, ancestors = case([5, 200], 9, device, rng)
    with pytest.raises(RuntimeError, match=r"context has shape \[1\], wants \[2\]"):
        ops.tree_place(context[:1], table, depth, ancestors)
    with pytest.raises(RuntimeError, match="block_table has no pages"):
        ops.tree_place(context, table[:, :0], depth, ancestors)
    with pytest.raises(RuntimeError, match="block_table has dtype Long, wants Int"):
        ops.tree_place(context, table.long(), depth, ancestors)
    with pytest.raises(RuntimeError, match="depth has dtype Long, wants Int"):
        ops.tree_place(context, table, depth.long(), ancestors)
    with pytest.raises(RuntimeError, match="depth must be contiguous"):
        ops.tree_place(context, table, depth[:1].expand(2, 9), ancestors)
    with pytest.raises(RuntimeError, match="ancestors has dtype Int, wants Long"):
        ops.tree_place(context, table, depth, ancestors.int())
