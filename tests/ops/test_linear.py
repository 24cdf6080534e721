import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

F32, BF16 = torch.float32, torch.bfloat16
DTYPES = [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16)]  # of x and w


def case(T, G, I, O, dtypes, device, rng, shift=0):
    """x [T, G, I], strided, and w [G, O, I], between NaN, both `shift` elements off alignment."""
    x = torch.full((T, G, I + 16), torch.nan)
    x[..., shift : shift + I] = torch.randn(T, G, I, generator=rng)
    w = torch.full((G * O * I + 16,), torch.nan)
    w[shift : shift + G * O * I] = torch.randn(G * O * I, generator=rng)
    x, w = x.to(dtypes[0]).to(device), w.to(dtypes[1]).to(device)
    return x[..., shift : shift + I], w[shift : shift + G * O * I].view(G, O, I)


def between_nan(rows, features, dtype, device, rng, pitch=64):
    """Rows on 16 bytes, with NaN between them."""
    x = torch.full((rows, features + pitch), torch.nan)
    x[:, :features] = torch.randn(rows, features, generator=rng)
    return x.to(dtype).to(device)[:, :features]


def linear_ref(x: torch.Tensor, w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The product and the sum of its terms' magnitudes."""
    x, w = x.double().cpu().numpy(), w.double().cpu().numpy()
    return np.einsum("tgi,goi->tgo", x, w), np.einsum("tgi,goi->tgo", np.abs(x), np.abs(w))


SHAPES = [(1, 1, 1), (3, 7, 5), (8, 64, 33), (9, 513, 17), (2, 1000, 40), (5, 7168, 384)]
LARGE = [(2, 18432, 100), (3, 7168, 640), (1, 1536, 3000)]


@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "bf16-f32", "f32-bf16"])
@pytest.mark.parametrize(
    "T, I, O", [*SHAPES, *(pytest.param(*s, marks=pytest.mark.large) for s in LARGE)]
)
def test_matches_float64(T, I, O, dtypes, device, rng):
    x, w = case(T, 1, I, O, dtypes, device, rng)
    want, scale = linear_ref(x, w)
    got = ops.linear(x[:, 0], w[0], torch.float32)
    assert_close("linear", got, want[:, 0], scale[:, 0])
    # Any other output is that one, rounded once.
    assert torch.equal(ops.linear(x[:, 0], w[0]), got.to(dtypes[0]))
    assert torch.equal(ops.linear(x[:, 0], w[0], dtypes[0]), got.to(dtypes[0]))


@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "bf16-f32", "f32-bf16"])
@pytest.mark.parametrize(
    "T, G, I, O",
    [
        (1, 1, 8, 3),
        (3, 5, 30, 7),
        (70, 3, 48, 20),
        (20, 4, 1096, 9),
        pytest.param(2, 64, 512, 128, marks=pytest.mark.large),
        pytest.param(40, 3, 264, 6202, marks=pytest.mark.large),
    ],
)
def test_groups_match_float64(T, G, I, O, dtypes, device, rng):
    x, w = case(T, G, I, O, dtypes, device, rng)
    got = ops.linear(x, w, torch.float32)
    assert_close("linear", got, *linear_ref(x, w))
    assert torch.equal(ops.linear(x, w), got.to(dtypes[0]))
    for g in range(G):  # a group is the product of its own, with the same bits
        assert torch.equal(got[:, g], ops.linear(x[:, g], w[g], torch.float32))
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(ops.linear(turned, w, torch.float32), got)


@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "bf16-f32", "f32-bf16"])
@pytest.mark.parametrize("I, O", [(321, 37), (1032, 24)])
def test_row_invariance(I, O, dtypes, device, rng):
    x, w = case(1024, 1, I, O, dtypes, device, rng)
    x, w = x[:, 0], w[0]
    want = ops.linear(x, w, torch.float32)
    assert torch.equal(ops.linear(x, w, torch.float32), want)
    for T in (1, 2, 3, 4, 5, 8, 17, 64):
        assert torch.equal(ops.linear(x[:T], w, torch.float32), want[:T])
    order = torch.randperm(1024, generator=rng).to(device)
    assert torch.equal(ops.linear(x[order], w, torch.float32), want[order])
    for place in range(11):  # among neighbours that are not finite
        alone = torch.full((11, I), torch.nan, dtype=x.dtype, device=device)
        alone[place] = x[7]
        assert torch.equal(ops.linear(alone, w, torch.float32)[place], want[7])


# Inputs that make 1, 2, 4 and (for few outputs) 8 runs, some of them short or empty; outputs that
# fill no tile.
@pytest.mark.parametrize(
    "I, O", [(8, 1), (128, 512), (1096, 5), (2200, 33), (4232, 24), (1024, 2112)]
)
def test_rows_alone_and_among_130(I, O, device, rng):
    """Each number of rows has kernels of its own, and all have the same bits."""
    x = between_nan(1024, I, BF16, device, rng)
    w = torch.randn(O, I, generator=rng).bfloat16().to(device)
    want = ops.linear(x, w, F32)
    for T in range(1, 131):
        assert torch.equal(ops.linear(x[:T], w, F32), want[:T]), T
    for first, T in [(1023, 1), (960, 64), (77, 300)]:
        assert torch.equal(ops.linear(x[first : first + T], w, F32), want[first : first + T])
    assert torch.equal(ops.linear(x[:70], w), want[:70].bfloat16())


@pytest.mark.parametrize("I, O", [(1096, 18433), (1096, 12200), (2056, 18000), (64, 70000)])
def test_number_of_rows_among_many_outputs(I, O, device, rng):
    """Tiles of more outputs, one after the other, and other clusters."""
    x = between_nan(130, I, BF16, device, rng)
    w = torch.randn(O, I, generator=rng).bfloat16().to(device)
    want = ops.linear(x, w, F32)
    for T in (1, 17, 33, 64, 65):
        assert torch.equal(ops.linear(x[:T], w, F32), want[:T]), T


@pytest.mark.parametrize("T", [5, 13, 40, 70, 200])
def test_other_rows_do_not_matter(T, device, rng):
    """Neighbours that are not finite, in every place of a tile."""
    x, w = torch.randn(T, 1096, generator=rng), torch.randn(40, 1096, generator=rng)
    x, w = x.bfloat16().to(device), w.bfloat16().to(device)
    want = ops.linear(x, w)
    for place in {0, 1, T // 2, T - 1}:
        among = torch.full_like(x, torch.nan)
        among[::2] = torch.inf
        among[place] = x[place]
        assert torch.equal(ops.linear(among, w)[place], want[place])


@pytest.mark.parametrize("T", [1, 16, 64, 130])
def test_runs_are_equal(T, device, rng):
    x = between_nan(T, 2176, BF16, device, rng)
    w = torch.randn(200, 2176, generator=rng).bfloat16().to(device)
    want = ops.linear(x, w, F32)
    for _ in range(200 if device.type == "cuda" else 2):
        assert torch.equal(ops.linear(x, w, F32), want)


def test_one_row_many_times(device, rng):
    """A row that stands in memory once: its stride is zero."""
    x = torch.randn(1, 1040, generator=rng).bfloat16().to(device)
    w = torch.randn(40, 1040, generator=rng).bfloat16().to(device)
    assert torch.equal(ops.linear(x.expand(70, -1), w), ops.linear(x, w).expand(70, -1))


@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "bf16-f32", "f32-bf16"])
@pytest.mark.parametrize("T", [1, 2, 4, 9])
def test_number_of_outputs_changes_no_bit(T, dtypes, device, rng):
    """CUDA gives a block one output where there are few and more where there are many."""
    x, w = case(T, 1, 520, 3001, dtypes, device, rng)
    x, w = x[:, 0], w[0]
    assert torch.equal(ops.linear(x, w[1003:1040]), ops.linear(x, w)[:, 1003:1040])


@pytest.mark.parametrize("dtypes", DTYPES, ids=["f32", "bf16", "bf16-f32", "f32-bf16"])
@pytest.mark.parametrize("T", [1, 6, 16, 40, 70])
def test_alignment_changes_no_bit(T, dtypes, device, rng):
    x, w = case(T, 3, 1288, 9, dtypes, device, rng)
    shifted = case(T, 3, 1288, 9, dtypes, device, rng, shift=1)
    shifted[0].copy_(x)
    shifted[1].copy_(w)
    assert torch.equal(ops.linear(*shifted), ops.linear(x, w))


def test_weights_dtype_changes_no_bit_on_a_cpu(rng):
    """A bfloat16 weight is the same number in half the bytes."""
    x, w = torch.randn(5, 3, 777, generator=rng), torch.randn(3, 40, 777, generator=rng).bfloat16()
    assert torch.equal(ops.linear(x, w), ops.linear(x, w.float()))


def test_nothing(device):
    zeros = torch.zeros
    assert ops.linear(zeros(0, 8, device=device), zeros(3, 8, device=device)).shape == (0, 3)
    assert ops.linear(zeros(2, 8, device=device), zeros(0, 8, device=device)).shape == (2, 0)
    got = ops.linear(zeros(2, 4, 0, device=device), zeros(4, 3, 0, device=device))
    assert torch.equal(got, zeros(2, 4, 3, device=device))


@pytest.mark.parametrize("I", [37, 40])
def test_infinities_pass(I, device):
    """A missing input is zero times zero, not zero times some weight."""
    x, w = torch.ones(1, I, device=device), torch.ones(2, I, device=device)
    w[0] = torch.inf
    assert ops.linear(x, w).tolist() == [[torch.inf, I]]


@pytest.mark.parametrize("out_dtype", [None, F32])
def test_registration(out_dtype, device, rng):
    x, w = case(3, 2, 24, 5, (BF16, BF16), device, rng)
    opcheck(torch.ops.kdtree.linear, (x, w, out_dtype))
    opcheck(torch.ops.kdtree.linear, (x[:, 0], w[0].float(), out_dtype))


def test_rejects_bad_arguments(device):
    x, w = torch.zeros(2, 64, device=device), torch.zeros(3, 64, device=device)
    grouped = torch.zeros(2, 4, 64, device=device)
    with pytest.raises(RuntimeError, match=r"w has shape \[3, 32\], wants \[O, 64\]"):
        ops.linear(x, w[:, :32])
    with pytest.raises(RuntimeError, match=r"w has shape \[3, 64\], wants \[4, O, 64\]"):
        ops.linear(grouped, w)
    with pytest.raises(RuntimeError, match=r"w has shape \[5, 3, 64\], wants \[4, O, 64\]"):
        ops.linear(grouped, torch.zeros(5, 3, 64, device=device))
    with pytest.raises(RuntimeError, match=r"x has shape \[64\], wants \[T, I\] or \[T, G, I\]"):
        ops.linear(x[0], w)
    with pytest.raises(RuntimeError, match="x must have contiguous features"):
        ops.linear(torch.zeros(64, 2, device=device).t(), w)
    with pytest.raises(RuntimeError, match="w must be contiguous"):
        ops.linear(x, torch.zeros(64, 3, device=device).t())
    with pytest.raises(RuntimeError, match="w has dtype Half, wants Float or BFloat16"):
        ops.linear(x.bfloat16(), w.half())
    with pytest.raises(RuntimeError, match="x has dtype Double, wants Float or BFloat16"):
        ops.linear(x.double(), w)
    with pytest.raises(RuntimeError, match="out_dtype is BFloat16, wants Float$"):
        ops.linear(x, w, BF16)
