"""The promise under lossless decoding: a row's bits follow from its position and its keys' values.

The same keys at positions 0 .. p are attended to from a plain decoding step, from the end of a
prefill chain and from nodes of random trees, and all must agree bit for bit.
"""

import pytest
import torch
from attention_case import Case, ancestor_words, paged, random_parents

DTYPES = [torch.float32, torch.bfloat16]
C, R = 24, 6


def as_case(keys, q, context, rng, ancestors=None, N=1, target=0, latent=C) -> Case:
    """The keys by position, beside a sequence of the same batch that holds something else.

    The row under test is node `target` of the second sequence; other slots hold random rows.
    """
    B, H, Z = 2, *q.shape
    cache, block_table = paged([context + N] * B, q.dtype, Z, rng)
    used = block_table[:, : -(-(context + N) // 64)].flatten().long()
    cache[used] = torch.randn(len(used), 64, Z, generator=rng).to(q.dtype)
    case = Case(
        q=torch.randn(B, N, H, Z, generator=rng).to(q.dtype),
        cache=cache,
        block_table=block_table,
        context=torch.full((B,), context, dtype=torch.int32),
        ancestors=ancestors and torch.tensor([ancestors] * B),
        latent=latent,
        scale=0.4 if latent == C else 0.05,
    )
    case.q[1, target] = q
    case.cache[case.rows(1, case.slots(1, target))] = keys
    return case


def tree_with_depth(depth: int, rng: torch.Generator) -> tuple[list[int], int]:
    """Ancestor words of a random tree, and a node of it at that depth."""
    N = int(torch.randint(depth + 1, 65, (1,), generator=rng))
    path = [0, *(torch.randperm(N - 1, generator=rng)[:depth] + 1).sort().values.tolist()]
    return ancestor_words(random_parents(N, rng, path), N), path[-1]


# About the edges of tiles, pages and splits, of the row itself and of its last key before the tail.
POSITIONS = [0, 1, 2, 14, 15, 16, 17, 31, 32, 47, 48, 63, 64, 79, 80, 127, 128, 142, 143, 144, 145]
POSITIONS += [271, 272, 511, 512, 527, 1023, 1040]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H", [1, 3, 9])
def test_tree_chain_and_step_agree(H, dtype, device, rng):
    for p in POSITIONS if H == 3 else (0, 15, 16, 145):
        keys = torch.randn(p + 1, C + R, generator=rng).to(dtype)
        q = 2 * torch.randn(H, C + R, generator=rng).to(dtype)
        want = as_case(keys, q, p, rng).to(device).run()[1, 0]
        assert torch.isfinite(want).all()

        def agrees(context, N, target, ancestors=None, p=p, keys=keys, q=q, want=want):
            case = as_case(keys, q, context, rng, ancestors, N, target).to(device)
            assert torch.equal(case.run()[1, target], want), (p, context, N, target)

        agrees(p, 1, 0, [1])
        agrees(0, p + 1, p)  # the last row of a prefill chain
        agrees(p // 2, p - p // 2 + 3, p - p // 2)  # a row of a later chunk of prefill
        for depth in {0, 1, 7, 14, 15, *torch.randint(0, 16, (2,), generator=rng).tolist()}:
            if depth <= p:
                words, node = tree_with_depth(depth, rng)
                assert (words[node] & (1 << 64) - 1).bit_count() == depth + 1
                agrees(p - depth, len(words), node, words)


def test_order_matters(device, rng):
    """The test above can fail: the same keys in another order have other bits."""
    keys = torch.randn(201, C + R, generator=rng)
    q = 2 * torch.randn(3, C + R, generator=rng)
    want = as_case(keys, q, 200, rng).to(device).run()[1, 0]
    swapped = keys.clone()
    swapped[[3, 190]] = keys[[190, 3]]
    assert not torch.equal(as_case(swapped, q, 200, rng).to(device).run()[1, 0], want)
