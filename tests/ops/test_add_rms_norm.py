import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

EPS = 1e-2  # large, so that a kernel that drops it fails
DTYPES = [torch.float32, torch.bfloat16]


def case(T, D, dtype, device, rng):
    x, residual = torch.randn(2, T, D, generator=rng).to(dtype).to(device)
    return x, residual * 3, torch.randn(D, generator=rng).to(dtype).to(device)


def shift(x):
    """The same contiguous tensor, one element off any alignment."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def rms_norm_ref(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, D", [(1, 1), (2, 7), (1, 8), (5, 333), (3, 512), (64, 7168)])
def test_matches_float64(T, D, dtype, device, rng):
    x, residual, w = case(T, D, dtype, device, rng)
    y, total = ops.add_rms_norm(x, residual, w, EPS)
    assert torch.equal(total, (x.float() + residual.float()).to(dtype))
    want = rms_norm_ref(total.double().cpu().numpy(), w.double().cpu().numpy(), EPS)
    assert_close("add_rms_norm", y, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_rms_norm_of_the_sum(dtype, device, rng):
    x, residual, w = case(9, 1536, dtype, device, rng)
    y, total = ops.add_rms_norm(x, residual, w, EPS)
    assert torch.equal(y, ops.rms_norm(total, w, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [333, 1536])
def test_row_invariance(D, dtype, device, rng):
    x, residual, w = case(1024, D, dtype, device, rng)
    want = torch.stack(ops.add_rms_norm(x, residual, w, EPS))
    assert torch.equal(torch.stack(ops.add_rms_norm(x, residual, w, EPS)), want)
    for T in (1, 2, 5, 17, 64):
        got = torch.stack(ops.add_rms_norm(x[:T], residual[:T], w, EPS))
        assert torch.equal(got, want[:, :T])
    order = torch.randperm(1024, generator=rng).to(device)
    got = torch.stack(ops.add_rms_norm(x[order], residual[order], w, EPS))
    assert torch.equal(got, want[:, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_changes_no_bit(dtype, device, rng):
    x, residual, w = case(5, 512, dtype, device, rng)
    want = ops.add_rms_norm(x, residual, w, EPS)
    got = ops.add_rms_norm(shift(x), residual, shift(w), EPS)
    assert torch.equal(torch.stack(got), torch.stack(want))


def test_no_rows(device, rng):
    y, total = ops.add_rms_norm(*case(0, 64, torch.float32, device, rng), EPS)
    assert y.shape == total.shape == (0, 64)


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.add_rms_norm, (*case(3, 64, torch.bfloat16, device, rng), EPS))


def test_rejects_bad_arguments(device):
    x, w = torch.zeros(2, 64, device=device), torch.zeros(64, device=device)
    with pytest.raises(RuntimeError, match=r"residual has shape \[1, 64\], wants \[2, 64\]"):
        ops.add_rms_norm(x, x[:1], w, EPS)
    with pytest.raises(RuntimeError, match="residual has dtype BFloat16, wants Float"):
        ops.add_rms_norm(x, x.bfloat16(), w, EPS)
    with pytest.raises(RuntimeError, match="x must be contiguous"):
        ops.add_rms_norm(torch.zeros(2, 72, device=device)[:, :64], x, w, EPS)
    with pytest.raises(RuntimeError, match=r"w has shape \[32\], wants \[64\]"):
        ops.add_rms_norm(x, x, w[:32], EPS)
    with pytest.raises(RuntimeError, match="x has dtype Half, wants Float or BFloat16"):
        ops.add_rms_norm(x.half(), x.half(), w.half(), EPS)
