import numpy as np
import pytest
import torch
from says import says
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

DTYPES = [torch.float32, torch.bfloat16]


def case(T, D, taps, groups, dtype, device, rng):
    """dynamic is a part of longer rows, as the product that makes it leaves it."""
    x = torch.randn(T, D, generator=rng).to(dtype)
    dynamic = torch.randn(T, 2, taps, groups, generator=rng).to(dtype)
    base = torch.randn(taps, D, generator=rng).to(dtype)
    return x.to(device), dynamic.to(device)[:, 1], base.to(device)


def block_conv_ref(x, dynamic, base, slots):
    x, dynamic, base = (v.double().cpu().numpy() for v in (x, dynamic, base))
    kernel = base + dynamic.repeat(x.shape[1] // dynamic.shape[2], 2)
    y, scale = np.zeros_like(x), np.zeros_like(x)
    for t in range(len(x)):
        for k in range(min(len(base), t % slots + 1)):
            y[t] += kernel[t, k] * x[t - k]
            scale[t] += abs(kernel[t, k] * x[t - k])
    return y, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "blocks, slots, D, taps, groups",
    [(1, 1, 1, 1, 1), (2, 8, 6, 3, 2), (3, 5, 300, 4, 300), (1, 16, 64, 16, 1), (2, 2, 8, 5, 4)],
)
def test_matches_float64(blocks, slots, D, taps, groups, dtype, device, rng):
    given = case(blocks * slots, D, taps, groups, dtype, device, rng)
    assert_close("block_conv", ops.block_conv(*given, slots), *block_conv_ref(*given, slots))


def test_a_block_sees_itself_alone(device, rng):
    x, dynamic, base = case(24, 12, 4, 3, torch.float32, device, rng)
    whole = ops.block_conv(x, dynamic, base, 8)
    x[8:16] = float("nan")
    got = ops.block_conv(x, dynamic, base, 8)
    assert torch.equal(got[:8], whole[:8]) and torch.equal(got[16:], whole[16:])
    assert torch.equal(ops.block_conv(x[:8], dynamic[:8], base, 8), whole[:8])
    x[3:8] = float("nan")  # nor a slot those behind it
    assert torch.equal(ops.block_conv(x, dynamic, base, 8)[:3], whole[:3])


def test_no_rows(device, rng):
    assert ops.block_conv(*case(0, 4, 2, 2, torch.float32, device, rng), 8).shape == (0, 4)


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.block_conv, (*case(4, 6, 2, 3, torch.float32, device, rng), 2))


def test_rejects_bad_arguments(device, rng):
    given = dict(
        zip(("x", "dynamic", "base"), case(4, 6, 2, 3, torch.float32, device, rng), strict=True)
    )

    def refuses(message, slots=2, **changed):
        with says(RuntimeError, message):
            ops.block_conv(*(given | changed).values(), slots)

    x, dynamic = given["x"], given["dynamic"]
    refuses("x must be contiguous", x=torch.cat([x, x], 1)[:, :6])
    refuses("dynamic has shape [3, 2, 3] and dtype Float", dynamic=dynamic[:3])
    refuses("and dtype BFloat16, wants x's 4 rows and Float", dynamic=dynamic.bfloat16())
    refuses("dynamic must have contiguous rows", dynamic=dynamic.transpose(1, 2).contiguous().mT)
    refuses("base has shape [1, 6], wants [2, 6]", base=given["base"][:1])
    refuses(
        "x has 6 channels, wants a multiple of dynamic's 4",
        dynamic=torch.zeros_like(x)[:, None, :4],
    )
    refuses("slots is 3, wants a divisor of x's 4 rows", slots=3)
    refuses("slots is 0, wants a divisor", slots=0)
