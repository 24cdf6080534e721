"""Attention over FP8 latents: right over the rows as they are, and row-invariant as over others.

Rows are made by torch's conversions. Everything unused is poison: other rows, and the bytes of a
row that stand for nothing.
"""

import pytest
import torch
from attention_case import random_case
from fp8_rows import E4M3, POISON, quantised, widened
from test_mla_attention import check
from test_mla_attention_order import as_case, tree_with_depth
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
LARGE = pytest.mark.large


def fp8(case):
    """The case with its cache in FP8, rows of NaN as poison."""
    case.cache = quantised(case.cache, case.latent)
    return case


def fp8_case(*sizes, **options):
    return fp8(random_case(*sizes, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "context, N, H, C, R",
    [
        ([0], 1, 1, 16, 0),
        ([0, 1, 15, 16, 17], 5, 3, 16, 2),
        ([63, 64, 65, 31, 32], 3, 1, 48, 10),
        ([127, 128, 129, 143, 144, 145], 9, 5, 32, 7),
        ([300, 0], 64, 3, 16, 3),
        ([511, 512, 513], 7, 8, 128, 16),
        ([40], 3, 2, 752, 16),
        ([130], 3, 9, 512, 64),
        pytest.param([700, 1], 5, 64, 512, 64, marks=LARGE),
        pytest.param([5000], 9, 16, 512, 64, marks=LARGE),
    ],
)
@pytest.mark.parametrize("chain", [False, True])
def test_matches_float64(context, N, H, C, R, chain, dtype, device, rng):
    check(fp8_case(context, N, H, C, R, dtype, rng, chain=chain), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R", [(16, 2), (512, 64)])
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 129])
def test_mean_of_visible(context, C, R, dtype, device, rng):
    """With q = 0 every visible key weighs the same: one too many or too few shows at once."""
    case = fp8_case([context], 33, 2, C, R, dtype, rng)
    case.q.zero_()
    check(case, device)


@pytest.mark.parametrize("scale", [1.0, 448.0, 2.0**-20, 3e-5, 1234.5])
def test_every_code(scale, device):
    """A row that sees itself alone is its latent: every code's value times the scale, exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    row = torch.full((272,), POISON, dtype=torch.uint8)
    row[:256], row[256:260] = codes, torch.tensor([scale]).view(torch.uint8)
    row[[0x7F, 0xFF]] = 0  # a NaN spoils its own feature and, in the sum of scores, all others
    want = codes.view(E4M3).float() * scale
    want[[0x7F, 0xFF]] = 0
    cache = torch.full((1, 64, 272), POISON, dtype=torch.uint8)
    cache[0, 0] = row
    q, context = torch.zeros(1, 1, 1, 256), torch.zeros(1, dtype=torch.int32)
    args = [x.to(device) for x in (q, cache, context[None], context)]
    got = ops.mla_attention(*args, None, 256, 1.0).cpu().flatten()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_shows(code, dtype, device, rng):
    case = fp8_case([20], 3, 2, 32, 8, dtype, rng)
    case.cache[case.rows(0, [4])] = case.cache[case.rows(0, [4])].index_fill(
        1, torch.tensor([5]), code
    )
    assert case.to(device).run().isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding(dtype, device, rng):
    """Padded rows are zero; nothing of theirs is read, and a padded sequence may be all wild."""
    case = fp8_case([70, 3, 5], 9, 3, 32, 6, dtype, rng, nodes=[6, 9, 0])
    case.q[0, 6:] = case.q[2] = float("nan")
    case.context[2] = 2**31 - 100
    got = case.to(device).run()
    assert not got[0, 6:].any() and not got[2].any()
    check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R", [(32, 6), (512, 64)])
def test_other_nodes_are_not_seen(C, R, dtype, device, rng):
    """Poison in the slot of every node that is no ancestor changes no bit of a row."""
    case = fp8_case([100], 24, 2, C, R, dtype, rng)
    whole = case.to(device).run()
    clean = case.cache.clone()
    for n in range(24):
        case.cache = clean.clone()
        hidden = sorted(set(range(100, 124)) - set(case.slots(0, n)))
        case.cache[case.rows(0, hidden)] = POISON
        assert torch.equal(case.to(device).run()[0, n], whole[0, n])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("C, R", [(32, 6), (512, 64)])
def test_row_invariance(C, R, dtype, device, rng):
    """Sequences, nodes and heads alone have the bits that they have together."""
    case = fp8_case([300, 17, 140], 12, 20, C, R, dtype, rng, nodes=[12, 12, 7]).to(device)
    whole, given = case.run(), vars(case).copy()
    assert torch.equal(whole, case.run()) and not whole[2, 7:].any()
    for b in range(3):
        one = slice(b, b + 1)
        case.block_table, case.context = given["block_table"][one], given["context"][one]
        for nodes, heads in ((12, 20), (1, 20), (5, 3), (12, 1)):
            case.q = given["q"][one, :nodes, :heads].contiguous()
            case.ancestors = given["ancestors"][one, :nodes].contiguous()
            assert torch.equal(case.run(), whole[one, :nodes, :heads])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("H, C, R", [(1, 32, 6), (3, 32, 6), (3, 512, 64), (8, 512, 64)])
def test_tree_chain_and_step_agree(H, C, R, dtype, device, rng):
    """The promise under lossless decoding, as test_mla_attention_order.py has it."""
    positions = [0, 15, 16, 63, 79, 80, 145, 271, 272, 527]
    if C == 512 and device.type == "cuda":
        positions += [1023, 4095, 4111, 4112, 4623, 4624]
    for p in positions:
        keys = torch.randn(p + 1, C + R, generator=rng).to(dtype)
        q = 2 * torch.randn(H, C + R, generator=rng).to(dtype)
        want = fp8(as_case(keys, q, p, rng, latent=C)).to(device).run()[1, 0]
        assert torch.isfinite(want).all()
        for depth in {depth for depth in (0, 7, 15) if depth <= p}:
            words, node = tree_with_depth(depth, rng)
            case = as_case(keys, q, p - depth, rng, words, len(words), node, latent=C)
            assert torch.equal(fp8(case).to(device).run()[1, node], want), (p, depth)
        for context in {max(p - 20, 0), p // 2 if p < 600 else p - 100}:
            N = p - context + 1
            case = as_case(keys, q, context, rng, None, N + 2, N - 1, latent=C)
            assert torch.equal(fp8(case).to(device).run()[1, N - 1], want), (p, context)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize(
    "context, N, H",
    [
        ([300, 0, 64], 9, 16),
        ([4200], 64, 8),
        ([130], 3, 2),
        ([25000], 8, 8),  # from here on rows are widened where they are read
        ([24700, 40, 24577], 7, 16),
        ([33333], 1, 64),
    ],
)
@pytest.mark.parametrize("chain", [False, True])
def test_on_tensor_cores_rows_are_rounded_to_bfloat16(context, N, H, chain, rng):
    """Latents of 512 + 64: the bits of the op over the widened rows, rounded once."""
    case = fp8_case(context, N, H, 512, 64, torch.bfloat16, rng, chain=chain)
    rounded = widened(case.cache, 512, 64).float().bfloat16()
    got = case.to(torch.device("cuda")).run()
    case.cache = rounded
    assert torch.equal(got, case.to(torch.device("cuda")).run())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_replays_read_the_context(rng):
    """One graph serves every context that the table has room for."""
    device = torch.device("cuda")
    case = fp8_case([3000], 8, 16, 512, 64, torch.bfloat16, rng).to(device)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run()
    for context in (2990, 3, 700, 2992):
        case.context.fill_(context)
        graph.replay()
        assert torch.equal(got, case.run())


@pytest.mark.large
def test_cache_beyond_32_bits(device, rng):
    """Most of the cache is never touched, so the pages cost no memory on a CPU."""
    case = fp8_case([40], 3, 2, 512, 64, torch.bfloat16, rng).to(device)
    whole = case.run()
    pages = 2**32 // (64 * 656) + 2
    cache = torch.empty(pages, 64, 656, dtype=torch.uint8, device=device)
    cache[-1] = case.cache[case.block_table[0, 0]]
    case.cache = cache
    case.block_table[0, 0] = pages - 1
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize("chain", [False, True])
def test_registration(chain, device, rng):
    case = fp8_case([3], 2, 2, 16, 2, torch.float32, rng, chain=chain).to(device)
    opcheck(torch.ops.kdtree.mla_attention, tuple(vars(case).values()))


def test_rejects_bad_arguments(device, rng):
    good = vars(fp8_case([3, 9], 2, 2, 16, 2, torch.float32, rng).to(device))
    cache = good["cache"]

    def rejects(message, **bad):
        with pytest.raises(RuntimeError, match=message):
            ops.mla_attention(*(good | bad).values())

    rejects("cache has rows of 47 bytes, wants 48 for FP8 latents of 16 and 2 features",
            cache=cache[..., :47].contiguous())  # fmt: skip
    rejects("latents are FP8, but have 15 features, wants a multiple of 16", latent=15)
    rejects("cache has pages of 32 tokens, wants 64", cache=cache[:, :32].clone())
    shifted = torch.empty(cache.numel() + 4, dtype=torch.uint8, device=device)[4:]
    rejects("cache must start at a multiple of 16 bytes", cache=shifted.view(cache.shape))
    wide = torch.zeros(2, 2, 2, 48, device=device)
    rejects("cache has dtype Char, wants Float", q=wide, cache=cache.to(torch.int8))
