import numpy as np
import pytest
import torch
from rotation import rotate_ref
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]
POSITIONS = 40  # of the rotation table


def case(T, H, P, C, R, dtype, device, rng):
    wide = torch.randn(T, H * (P + R) + 6, generator=rng).to(dtype)
    q = wide.to(device)[:, 2 : H * (P + R) + 2].unflatten(1, (H, P + R))  # strided, unaligned
    w_uk = torch.randn(H, C, P, generator=rng).to(dtype)
    # Any numbers, not cosines, so that a swap of the two halves shows.
    rope = torch.randn(POSITIONS, R, generator=rng)
    position = torch.randint(0, POSITIONS, (T,), generator=rng, dtype=torch.int32)
    return q, w_uk.to(device), rope.to(device), position.to(device)


def mla_query_ref(q, w_uk, rope, position, interleaved):
    q, w_uk, rope = (x.double().cpu().numpy() for x in (q, w_uk, rope))
    position = position.cpu().numpy()
    P = w_uk.shape[2]
    nope = np.einsum("hcp,thp->thc", w_uk, q[..., :P])
    nope_scale = np.einsum("hcp,thp->thc", abs(w_uk), abs(q[..., :P]))
    rotated, scale = rotate_ref(q[..., P:], rope[np.maximum(position, 0)][:, None], interleaved)
    padded = (position < 0)[:, None, None]
    want = np.where(padded, 0, np.concatenate([nope, rotated], -1))
    return want, np.concatenate([nope_scale, scale], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "T, H, P, C, R",
    [
        (1, 1, 1, 1, 2),
        (3, 3, 7, 5, 6),
        (9, 2, 32, 33, 0),
        (35, 8, 32, 128, 16),
        (2, 3, 200, 40, 8),
        (70, 1, 320, 24, 2),
        (133, 2, 128, 136, 64),
        (3, 2, 520, 9, 4),
        pytest.param(9, 64, 128, 512, 64, marks=pytest.mark.large),
    ],
)
def test_matches_float64(T, H, P, C, R, interleaved, dtype, device, rng):
    args = case(T, H, P, C, R, dtype, device, rng)
    want, scale = mla_query_ref(*args, interleaved)
    assert_close("mla_query", ops.mla_query(*args, interleaved), want, scale)


def test_rotation_layouts(device):
    """The first unit vector meets its neighbour where interleaved, else the one half a row on."""
    q = torch.zeros(1, 1, 1 + 8, device=device)
    q[..., 1] = 1
    rope = torch.tensor([[0.25] * 4 + [0.5] * 4], device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    w = torch.ones(1, 1, 1, device=device)
    pairs = ops.mla_query(q, w, rope, position, True)[0, 0, 1:].tolist()
    halves = ops.mla_query(q, w, rope, position, False)[0, 0, 1:].tolist()
    assert pairs == [0.25, 0.5, 0, 0, 0, 0, 0, 0]
    assert halves == [0.25, 0, 0, 0, 0.5, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [9, 70, 150])
def test_padding_and_table_end(T, dtype, device, rng):
    """A padded row is zero whatever it holds; a position beyond the table stays inside it."""
    q, w_uk, rope, position = case(T, 3, 8, 5, 4, dtype, device, rng)
    want = ops.mla_query(q, w_uk, rope, position, True)
    position[1] = position[8] = position[T - 1] = -1
    q[1] = q[8] = q[T - 1] = float("nan")
    got = ops.mla_query(q, w_uk, rope, position, True)
    assert not got[[1, 8, T - 1]].any()
    others = [t for t in range(T) if t not in (1, 8, T - 1)]
    assert torch.equal(got[others], want[others])
    position[3] = 2**31 - 1
    got = ops.mla_query(q, w_uk, rope, position, True)
    position[3] = POSITIONS - 1
    assert torch.equal(got, ops.mla_query(q, w_uk, rope, position, True))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("P, R", [(32, 16), (7, 2), (520, 8)])
def test_row_invariance(P, R, dtype, device, rng):
    q, w_uk, rope, position = case(1024, 3, P, 37, R, dtype, device, rng)
    whole = ops.mla_query(q, w_uk, rope, position, True)
    assert torch.equal(whole, ops.mla_query(q, w_uk, rope, position, True))
    for T in (1, 2, 5, 17, 64):
        rows = torch.randint(0, 1024, (T,), generator=rng).to(device)
        some = ops.mla_query(q[rows].contiguous(), w_uk, rope, position[rows], True)
        assert torch.equal(some, whole[rows])


@pytest.mark.parametrize("P, C, R", [(128, 520, 64), (200, 72, 6), (500, 33, 0)])
def test_rows_alone_and_among_130(P, C, R, device, rng):
    """Each number of rows has tiles of its own, and all have the same bits."""
    q, w_uk, rope, position = case(300, 2, P, C, R, torch.bfloat16, device, rng)
    aligned = q.contiguous()
    want = ops.mla_query(aligned, w_uk, rope, position, False)
    assert torch.equal(ops.mla_query(q, w_uk, rope, position, False), want)
    for T in range(1, 131):
        got = ops.mla_query(aligned[:T], w_uk, rope, position[:T], False)
        assert torch.equal(got, want[:T]), T
    for first, T in [(299, 1), (77, 200)]:
        rows = slice(first, first + T)
        assert torch.equal(ops.mla_query(q[rows], w_uk, rope, position[rows], False), want[rows])


@pytest.mark.parametrize("H", [1, 40])
@pytest.mark.parametrize("T", [1, 12, 30, 60, 200])
def test_number_of_heads_changes_no_bit(T, H, device, rng):
    """The latent part is a product a head, as linear has it; many heads have wider tiles."""
    q, w_uk, rope, position = case(T, H, 128, 96, 8, torch.bfloat16, device, rng)
    got = ops.mla_query(q, w_uk, rope, position, True)
    assert torch.equal(got[..., :96], ops.linear(q[..., :128], w_uk))
    alone = ops.mla_query(q[:, :1], w_uk[:1], rope, position, True)
    assert torch.equal(alone, got[:, :1])


def test_no_rows(device, rng):
    assert ops.mla_query(*case(0, 2, 4, 8, 2, torch.float32, device, rng), True).shape == (0, 2, 10)


def test_registration(device, rng):
    args = case(3, 2, 4, 8, 2, torch.float32, device, rng)
    opcheck(torch.ops.kdtree.mla_query, (*args, True))


def test_rejects_bad_arguments(device, rng):
    q, w_uk, rope, position = case(3, 2, 4, 8, 2, torch.float32, device, rng)
    with pytest.raises(RuntimeError, match=r"w_uk has shape \[2, 8, 3\], wants \[2, 8, 4\]"):
        ops.mla_query(q, w_uk[..., :3].contiguous(), rope, position, True)
    with pytest.raises(RuntimeError, match="w_uk has dtype BFloat16, wants Float"):
        ops.mla_query(q, w_uk.bfloat16(), rope, position, True)
    with pytest.raises(RuntimeError, match="q has dtype Double, wants Float or BFloat16"):
        ops.mla_query(q.double(), w_uk.double(), rope, position, True)
    with pytest.raises(RuntimeError, match="rope has 3 features, wants an even number"):
        ops.mla_query(q, w_uk, torch.zeros(5, 3, device=device), position, True)
    with pytest.raises(RuntimeError, match="rope has no positions"):
        ops.mla_query(q, w_uk, rope[:0], position, True)
    with pytest.raises(RuntimeError, match="position has dtype Long, wants Int"):
        ops.mla_query(q, w_uk, rope, position.long(), True)
    with pytest.raises(RuntimeError, match="q must have contiguous heads and features"):
        ops.mla_query(torch.zeros(3, 6, 2, device=device).mT, w_uk, rope, position, True)
    with pytest.raises(RuntimeError, match="q has 2 features, wants more than rope's 2"):
        ops.mla_query(q[..., :2].contiguous(), w_uk, rope, position, True)
