"""Latents of 512 + 64 features in bfloat16, which have kernels of their own on a GPU."""

import pytest
import torch
from attention_case import random_case
from test_mla_attention import check
from test_mla_attention_order import as_case, tree_with_depth

C, R = 512, 64
BF16 = torch.bfloat16
LARGE = pytest.mark.large


def case_of(context, N, H, rng, **options):
    return random_case(context, N, H, C, R, BF16, rng, **options)


@pytest.mark.parametrize(
    "context, N, H",
    [
        ([0, 1, 15], 3, 3),
        ([16, 63, 64, 79, 80], 2, 8),
        ([271, 272], 9, 1),
        pytest.param([300, 0], 64, 8, marks=LARGE),
        pytest.param([1023, 40], 16, 64, marks=LARGE),
        pytest.param([4111], 3, 128, marks=LARGE),
        pytest.param([33000], 5, 16, marks=LARGE),
    ],
)
@pytest.mark.parametrize("chain", [False, True])
def test_matches_float64(context, N, H, chain, device, rng):
    check(case_of(context, N, H, rng, chain=chain), device)


@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 79, 80, 129])
@pytest.mark.parametrize("H", [1, 4, 20])
def test_mean_of_visible(context, H, device, rng):
    """With q = 0 every visible key weighs the same; all others hold NaN."""
    case = case_of([context], 17, H, rng)
    case.q.zero_()
    check(case, device)


def test_deeper_than_a_draft_may_be(device, rng):
    """A tree of one branch of 40: right, if not with the bits of plain decoding."""
    case = case_of([30], 40, 2, rng)
    case.ancestors[0] = torch.tensor([(1 << n + 1) - 1 for n in range(40)])
    check(case, device)


@pytest.mark.parametrize("H", [1, 3, 8])
def test_tree_chain_and_step_agree(H, device, rng):
    """About the edges of pages and splits, as the test of that name of the general kernel."""
    positions = [0, 15, 16, 63, 79, 80, 271, 272, 527]
    if device.type == "cuda":
        positions += [1023, 4095, 4111, 4112, 4623, 4624, 32783, 32784, 33807]
    for p in positions:
        keys = torch.randn(p + 1, C + R, generator=rng).to(BF16)
        q = 2 * torch.randn(H, C + R, generator=rng).to(BF16)
        want = as_case(keys, q, p, rng, latent=C).to(device).run()[1, 0]
        assert torch.isfinite(want).all()
        depths = {depth for depth in (0, 7, 15) if depth <= p}
        shapes = [(p - depth, *tree_with_depth(depth, rng)) for depth in depths]
        for context, words, node in shapes:
            case = as_case(keys, q, context, rng, words, len(words), node, latent=C).to(device)
            assert torch.equal(case.run()[1, node], want), (p, context, len(words))
        for context in {max(p - 20, 0), p // 2 if p < 600 else p - 100}:
            N = p - context + 1
            case = as_case(keys, q, context, rng, None, N + 2, N - 1, latent=C).to(device)
            assert torch.equal(case.run()[1, N - 1], want), (p, context)


def test_rows_alone(device, rng):
    """Sequences, nodes and heads alone have the bits that they have together."""
    case = case_of([300, 17, 140], 12, 20, rng, nodes=[12, 12, 7]).to(device)
    whole, parts = case.run(), vars(case).copy()
    assert torch.equal(whole, case.run()) and not whole[2, 7:].any()
    for b in range(3):
        one = slice(b, b + 1)
        case.block_table, case.context = parts["block_table"][one], parts["context"][one]
        for nodes, heads in ((12, 20), (1, 20), (5, 3), (12, 1)):
            case.q = parts["q"][one, :nodes, :heads].contiguous()
            case.ancestors = parts["ancestors"][one, :nodes].contiguous()
            assert torch.equal(case.run(), whole[one, :nodes, :heads])


@pytest.mark.parametrize("context", [100, 500, 1300, 4200])
@pytest.mark.parametrize("H", [8, 64])
def test_few_rows_and_many_agree(context, H, device, rng):
    """The last rows of a chain, alone and among so many that another kernel takes them."""
    N, few = (64, 8) if device.type == "cuda" else (3, 1)
    case = case_of([context], N, H if device.type == "cuda" else 4, rng, chain=True).to(device)
    whole, q = case.run(), case.q
    assert torch.isfinite(whole).all()
    for count in {1, few}:
        case.context.fill_(context + N - count)
        case.q = q[:, N - count :].contiguous()
        assert torch.equal(case.run(), whole[:, N - count :])


def test_capacity_changes_no_bit(device, rng):
    """Nor do wild entries of the block table beyond what is used."""
    case = case_of([500], 3, 8, rng).to(device)
    whole, table = case.run(), case.block_table
    case.block_table = torch.cat([table, table.new_full((1, 900), 2147480000)], 1)
    assert torch.equal(case.run(), whole)


@pytest.mark.parametrize("offset", [1, 4])
def test_unaligned(offset, device, rng):
    case = case_of([150], 6, 16, rng).to(device)
    whole = case.run()
    for name in ("q", "cache"):
        x = getattr(case, name)
        shifted = torch.empty(x.numel() + offset, dtype=BF16, device=device)[offset:]
        setattr(case, name, shifted.view(x.shape).copy_(x))
        assert torch.equal(case.run(), whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_replays_read_the_context(rng):
    """One graph serves every context that the table has room for."""
    device = torch.device("cuda")
    case = case_of([5000], 8, 16, rng).to(device)
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run()
    for context in (4990, 3, 700, 4992):
        case.context.fill_(context)
        graph.replay()
        assert torch.equal(got, case.run())
