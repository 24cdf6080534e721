from threading import Thread

import numpy as np
import pytest
import torch
from attention_case import random_case
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]


def mla_attention_ref(case) -> tuple[np.ndarray, np.ndarray]:
    """An untiled softmax a row; returns the output and the sums of its absolute terms."""
    q = case.q.double().numpy()
    want = np.zeros((*q.shape[:3], case.latent))
    scale = np.zeros_like(want)
    for b, n in np.ndindex(*q.shape[:2]):
        slots = case.slots(b, n)
        if not slots:
            continue
        keys = case.keys(b, slots)
        score = case.scale * q[b, n] @ keys.T
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        want[b, n] = weight @ keys[:, : case.latent]
        scale[b, n] = weight @ abs(keys[:, : case.latent])
    return want, scale


def check(case, device):
    latent = case.q.dtype == torch.bfloat16 and case.q.shape[3] == 576 and case.latent == 512
    op = "mla_attention_latent" if latent else "mla_attention"
    op += "_fp8" * (case.cache.dtype == torch.uint8)
    assert_close(op, case.to(device).run(), *mla_attention_ref(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "context, N, H, C, R",
    [
        ([0], 1, 1, 1, 0),
        ([0, 1, 15, 16, 17], 5, 3, 8, 2),
        ([63, 64, 65, 31, 32], 3, 1, 24, 6),
        ([127, 128, 129, 143, 144, 145], 9, 5, 24, 6),
        ([300, 0], 64, 3, 13, 2),
        ([511, 512, 513], 7, 8, 128, 16),
        ([1023], 4, 10, 128, 16),
        pytest.param([700, 1], 5, 64, 512, 64, marks=pytest.mark.large),
    ],
)
def test_matches_float64(context, N, H, C, R, dtype, device, rng):
    check(random_case(context, N, H, C, R, dtype, rng), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context, N", [([0, 200], 1), ([0, 5, 64], 70), ([130], 150)])
def test_chain_matches_float64(context, N, dtype, device, rng):
    check(random_case(context, N, 3, 24, 6, dtype, rng, chain=True), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", [0, 1, 15, 16, 17, 63, 64, 129, 200])
def test_mean_of_visible(context, dtype, device, rng):
    """With q = 0 every visible key weighs the same: one too many or too few shows at once."""
    case = random_case([context], 33, 2, 8, 2, dtype, rng)
    case.q.zero_()
    check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding(dtype, device, rng):
    """Padded rows are zero; nothing of theirs is read, and a padded sequence may be all wild."""
    case = random_case([70, 3, 5], 9, 3, 24, 6, dtype, rng, nodes=[6, 9, 0])
    case.q[0, 6:] = case.q[2] = float("nan")
    case.context[2] = 2**31 - 100
    got = case.to(device).run()
    assert not got[0, 6:].any() and not got[2].any()
    check(case, device)


def test_two_threads_of_different_sizes(device, rng):
    """One wants far more shared memory than the other; each gets what it has alone."""
    cases = [random_case([70], 3, 4, C, 8, torch.float32, rng).to(device) for C in (256, 512)]
    alone = [case.run() for case in cases]
    wrong = []

    def work(case, want):
        try:
            if not all(torch.equal(case.run(), want) for _ in range(200)):
                wrong.append("other bits")
        except RuntimeError as error:
            wrong.append(error)

    threads = [Thread(target=work, args=pair) for pair in zip(cases, alone, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_nodes_are_not_seen(dtype, device, rng):
    """NaN in the slot of every node that is no ancestor changes no bit of a row."""
    case = random_case([100], 40, 2, 24, 6, dtype, rng)
    whole = case.to(device).run()
    clean = case.cache.clone()
    for n in range(40):
        case.cache = clean.clone()
        visible = case.slots(0, n)
        hidden = sorted(set(range(100, 140)) - set(visible))
        case.cache[case.rows(0, hidden)] = float("nan")
        assert torch.equal(case.to(device).run()[0, n], whole[0, n])


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_invariance(dtype, device, rng):
    """Sequences, nodes and heads alone have the bits that they have together."""
    case = random_case([300, 17, 140], 20, 9, 24, 6, dtype, rng, nodes=[20, 20, 13]).to(device)
    whole = case.run()
    assert torch.equal(whole, case.run())
    q, block_table, context, ancestors = case.q, case.block_table, case.context, case.ancestors
    for b in range(3):
        one = slice(b, b + 1)
        case.block_table, case.context = block_table[one], context[one]
        case.q, case.ancestors = q[one], ancestors[one]
        assert torch.equal(case.run(), whole[one])
        for n in (0, 7, 12):
            case.q = q[one, n : n + 1].contiguous()
            case.ancestors = ancestors[one, n : n + 1].contiguous()
            assert torch.equal(case.run(), whole[one, n : n + 1])
        case.ancestors = ancestors[one]
        for h in (0, 4, 8):
            case.q = q[one, :, h : h + 1].contiguous()
            assert torch.equal(case.run(), whole[one, :, h : h + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_long_chain(dtype, device, rng):
    """A chain of 1024 rows, and its rows in chains of 64, 17, 5, 2 and 1 after what is before."""
    case = random_case([0], 1024, 3, 24, 6, dtype, rng, chain=True).to(device)
    q, whole = case.q, case.run()
    assert torch.isfinite(whole).all() and torch.equal(whole, case.run())
    for T in (64, 17, 5, 2, 1):
        for first in {*range(0, 1024 - T, 61), 1024 - T}:
            rows = slice(first, first + T)
            case.q = q[:, rows].contiguous()
            case.context = torch.full_like(case.context, first)
            assert torch.equal(case.run(), whole[:, rows]), (T, first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 16])
def test_rows_of_many_sequences(N, dtype, device, rng):
    """1024 rows of as many sequences, or of 64 trees, and of fewer of them in another order."""
    B = 1024 // N
    context = torch.randint(0, 100, (B,), generator=rng).tolist()
    case = random_case(context, N, 2, 8, 2, dtype, rng).to(device)
    whole, parts = case.run(), vars(case).copy()
    assert torch.isfinite(whole).all()
    for T in (1, 2, 5, 17, 64, 1024):
        some = torch.randperm(B, generator=rng)[: max(T // N, 1)].to(device)
        for name in ("q", "block_table", "context", "ancestors"):
            setattr(case, name, parts[name][some].contiguous())
        assert torch.equal(case.run(), whole[some]), T


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_cache(dtype, device, rng):
    """A cache that starts off 16 bytes has the same bits as one that does not."""
    case = random_case([150], 6, 3, 24, 8, dtype, rng).to(device)
    whole = case.run()
    shifted = torch.empty(case.cache.numel() + 1, dtype=dtype, device=device)[1:]
    case.cache = shifted.view(case.cache.shape).copy_(case.cache)
    assert torch.equal(case.run(), whole)


@pytest.mark.large
def test_cache_beyond_32_bits(device, rng):
    """Most of the cache is never touched, so the pages cost no memory on a CPU."""
    case = random_case([40], 3, 2, 512, 64, torch.bfloat16, rng).to(device)
    whole = case.run()
    pages = 2**31 // (64 * 576) + 2
    cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device=device)
    cache[-1] = case.cache[case.block_table[0, 0]]
    case.cache = cache
    case.block_table[0, 0] = pages - 1
    assert torch.equal(case.run(), whole)


def test_empty(device, rng):
    case = random_case([3], 2, 2, 8, 2, torch.float32, rng).to(device)
    case.q = case.q[:, :, :0]
    assert case.run().shape == (1, 2, 0, 8)


@pytest.mark.parametrize("chain", [False, True])
def test_registration(chain, device, rng):
    case = random_case([3], 2, 2, 8, 2, torch.float32, rng, chain=chain).to(device)
    opcheck(torch.ops.kdtree.mla_attention, tuple(vars(case).values()))


def test_rejects_bad_arguments(device, rng):
    good = vars(random_case([3, 9], 2, 2, 8, 2, torch.float32, rng).to(device))

    def rejects(message, **bad):
        with pytest.raises(RuntimeError, match=message):
            ops.mla_attention(*(good | bad).values())

    q, cache, words = good["q"], good["cache"], good["ancestors"]
    rejects(r"q has shape \[2, 2, 20\], wants 4 dimensions", q=q.flatten(2))
    rejects("q must be contiguous", q=q.transpose(1, 2))
    rejects("q has dtype Double, wants Float or BFloat16", q=q.double(), cache=cache.double())
    rejects("cache has dtype BFloat16, wants Float", cache=cache.bfloat16())
    rejects(r"cache has shape \[\d, 64, 9\], wants \[\d, 64, 10\]", cache=cache[..., :9].clone())
    rejects("cache has pages of 32 tokens, wants 64", cache=cache[:, :32].clone())
    rejects("block_table has dtype Long, wants Int", block_table=good["block_table"].long())
    rejects(r"context has shape \[1\], wants \[2\]", context=good["context"][:1])
    rejects("ancestors has dtype Int, wants Long", ancestors=words.int())
    rejects(
        "ancestors has 65 nodes, wants at most 64",
        q=q[:, :1].expand(2, 65, 2, 10).contiguous(),
        ancestors=words[:, :1].repeat(1, 65),
    )
    rejects("latent is 11, wants 1 to q's width 10", latent=11)
    rejects("latent is 0, wants", latent=0)
    wide = torch.zeros(2, 2, 2, 770, device=device)
    rejects(
        "q has width 770, wants at most 768", q=wide, cache=torch.zeros(1, 64, 770, device=device)
    )
    rejects("block_table holds 0 tokens", block_table=good["block_table"][:, :0].clone())
