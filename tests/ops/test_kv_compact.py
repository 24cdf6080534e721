import pytest
import torch
from torch.library import opcheck

from kdtree import ops

WILD = 2147480000  # a block table or path entry that must not be followed


def case(L, context, paths, dtype, Z, device, rng, J=None):
    """A cache of random bytes; a table of shuffled pages whose spare entries are wild."""
    B, J = len(context), J or max(map(len, paths)) + 1
    max_pages = max((s + 64) // 64 + 1 for s in context) + 1
    pages = B * max_pages + 1
    block_table = torch.full((B, max_pages), WILD, dtype=torch.int32)
    order = torch.randperm(pages, generator=rng).int()
    path = torch.full((B, J), WILD, dtype=torch.int32)
    for b, (s, nodes) in enumerate(zip(context, paths, strict=True)):
        used = (s + max(nodes, default=0)) // 64 + 1
        block_table[b, :used] = order[b * max_pages : b * max_pages + used]
        path[b, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (L, pages, 64, Z * size), generator=rng, dtype=torch.uint8)
    length = torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32)
    tables = block_table, torch.tensor(context, dtype=torch.int32), path, length
    return [x.to(device) for x in (data.view(dtype), *tables)]


def compact(cache, *tables):
    cache = cache.clone()
    ops.kv_compact(cache, *tables)
    return cache.view(torch.uint8).cpu()


def kv_compact_ref(cache, block_table, context, path, length):
    """All rows are read from the cache as it was."""
    old = cache.view(torch.uint8).cpu()
    new = old.clone()
    block_table, context, path, length = (x.tolist() for x in (block_table, context, path, length))
    for b, table in enumerate(block_table):
        for i, node in enumerate(path[b][: length[b]]):
            (page, at), (page2, at2) = divmod(context[b] + node, 64), divmod(context[b] + i, 64)
            new[:, table[page2], at2] = old[:, table[page], at]
    return new


@pytest.mark.parametrize(
    "dtype, Z",
    [
        (torch.uint8, 1),
        (torch.uint8, 7),
        (torch.int16, 9),
        (torch.float32, 5),
        (torch.float64, 3),
        (torch.bfloat16, 144),
        (torch.uint8, 656),  # FP8 latents of 512 + 64 features
        (torch.float32, 576),
    ],
)
def test_matches_reference(dtype, Z, device, rng):
    """Pages crossed, runs that overlap their targets, whole and partial identities, nothing."""
    context = [0, 60, 63, 64, 130, 5]
    paths = [[0, 2, 5], [0, 1, 2, 4, 5, 6, 7, 8], [0, 63], [0, 1, 2], [], list(range(1, 17))]
    args = case(3, context, paths, dtype, Z, device, rng)
    assert torch.equal(compact(*args), kv_compact_ref(*args))


def test_long_paths(device, rng):
    """More rows than a tree's deepest path, at random."""
    context = [int(torch.randint(0, 200, (1,), generator=rng)) for _ in range(8)]
    paths = [torch.randperm(64, generator=rng)[:n].sort().values.tolist() for n in range(5, 45, 5)]
    args = case(2, context, paths, torch.int32, 3, device, rng)
    assert torch.equal(compact(*args), kv_compact_ref(*args))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_unaligned_cache(offset, device, rng):
    cache, *tables = case(2, [62], [[0, 3, 4, 9]], torch.uint8, 48, device, rng)
    shifted = torch.empty(cache.numel() + offset, dtype=torch.uint8, device=device)[offset:]
    shifted = shifted.view(cache.shape).copy_(cache)
    ops.kv_compact(shifted, *tables)
    assert torch.equal(shifted.cpu(), kv_compact_ref(cache, *tables))


@pytest.mark.large
def test_cache_beyond_32_bits(device):
    """Most of the cache is never touched, so the pages cost no memory on a CPU."""
    pages = 2**31 // (64 * 576) + 2
    cache = torch.empty(1, pages, 64, 576, dtype=torch.bfloat16, device=device)
    cache[0, -1] = torch.arange(64, device=device)[:, None]
    tables = [[[pages - 1]], [3], [[0, 5, 60]], [3]]
    ops.kv_compact(cache, *(torch.tensor(x, dtype=torch.int32, device=device) for x in tables))
    want = [*range(4), 8, 63, *range(6, 64)]
    assert cache[0, -1, :, 575].tolist() == want


def test_empty(device, rng):
    cache, *tables = case(2, [3], [[0, 2]], torch.float32, 4, device, rng)
    none = [x[:0] for x in tables]
    assert torch.equal(compact(cache, *none), cache.view(torch.uint8).cpu())
    ops.kv_compact(cache[:0], *tables)


def test_registration(device, rng):
    args = case(2, [62], [[0, 3, 4]], torch.float32, 4, device, rng)
    opcheck(torch.ops.kdtree.kv_compact, args)


def test_rejects_bad_arguments(device, rng):
    cache, table, context, path, length = case(2, [62], [[0, 3, 4]], torch.float32, 4, device, rng)
    with pytest.raises(RuntimeError, match="cache has pages of 32 tokens, wants 64"):
        ops.kv_compact(cache[:, :, :32].contiguous(), table, context, path, length)
    with pytest.raises(RuntimeError, match="cache must be contiguous"):
        ops.kv_compact(cache[..., :3], table, context, path, length)
    with pytest.raises(RuntimeError, match=r"cache has shape \[.*\], wants 4 dimensions"):
        ops.kv_compact(cache[0], table, context, path, length)
    with pytest.raises(RuntimeError, match="path has dtype Long, wants Int"):
        ops.kv_compact(cache, table, context, path.long(), length)
    with pytest.raises(RuntimeError, match=r"length has shape \[0\], wants \[1\]"):
        ops.kv_compact(cache, table, context, path, length[:0])
    with pytest.raises(RuntimeError, match=r"block_table has shape \[0, \d\], wants \[1, \d\]"):
        ops.kv_compact(cache, table[:0], context, path, length)
