import numpy as np
import pytest
import torch
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]


def case(T, F, dtype, device, rng):
    return (torch.randn(T, 2 * F, generator=rng) * 3).to(dtype).to(device)  # both ends of silu


def swiglu_ref(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, F", [(1, 1), (3, 7), (2, 8), (5, 333), (64, 2048), (2, 18432)])
def test_matches_float64(T, F, dtype, device, rng):
    x = case(T, F, dtype, device, rng)
    assert_close("swiglu", ops.swiglu(x), swiglu_ref(x.double().cpu().numpy()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_gates(dtype, device):
    gate = torch.tensor([100.0, 1e30, 0.0, -100.0, -1e30])
    up = torch.tensor([3.0, 2.0, 5.0, 3.0, 2.0])
    x = torch.cat([gate, up])[None].to(dtype).to(device)
    want = torch.where(gate > 0, gate * up, 0).to(dtype)
    got = ops.swiglu(x)[0].cpu()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-30)  # silu(-100) is -4e-42
    assert torch.equal(got[:3], (x[0, :3] * x[0, 5:8]).cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("F", [333, 512])
def test_row_invariance(F, dtype, device, rng):
    x = case(1024, F, dtype, device, rng)
    want = ops.swiglu(x)
    assert torch.equal(ops.swiglu(x), want)
    for T in (1, 2, 5, 17, 64):
        assert torch.equal(ops.swiglu(x[:T]), want[:T])
    order = torch.randperm(1024, generator=rng).to(device)
    assert torch.equal(ops.swiglu(x[order]), want[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_alignment_changes_no_bit(dtype, device, rng):
    x = case(5, 512, dtype, device, rng)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert torch.equal(ops.swiglu(shifted), ops.swiglu(x))


def test_nothing(device):
    assert ops.swiglu(torch.zeros(0, 64, device=device)).shape == (0, 32)
    assert ops.swiglu(torch.zeros(3, 0, device=device)).shape == (3, 0)


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.swiglu, (case(3, 5, torch.float32, device, rng),))


def test_rejects_bad_arguments(device):
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(RuntimeError, match="x has 63 features, wants an even number"):
        ops.swiglu(torch.zeros(2, 63, device=device))
    with pytest.raises(RuntimeError, match="x must be contiguous"):
        ops.swiglu(x[:, :32])
    with pytest.raises(RuntimeError, match=r"x has shape \[64\], wants 2 dimensions"):
        ops.swiglu(x[0])
    with pytest.raises(RuntimeError, match="x has dtype Half, wants Float or BFloat16"):
        ops.swiglu(x.half())
