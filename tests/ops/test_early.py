"""Kernels that begin before the one before has ended wait for what it writes: rows of ops, each of
which reads what the one before wrote, launched one right after the other and one by one."""

import pytest
import torch

from kdtree import ops


class Layer:
    """The dense ops of a layer, in its order."""

    def __init__(self, device, rng):
        D, F, E = 2048, 1024, 96

        def weight(*shape, dtype=torch.bfloat16):
            return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5).to(device, dtype)

        self.norm, self.up, self.down = weight(D), weight(2 * F, D), weight(D, F)
        self.short = weight(4, 512, 512)
        self.gate, self.bias = weight(E, D, dtype=torch.float32), weight(E, dtype=torch.float32)
        codes = torch.randint(-(2**31), 2**31, (D, D // 8), generator=rng, dtype=torch.int32)
        self.packed, self.scale = ops.int4_pack(codes.to(device), weight(D, D // 32).abs() / 8)

    def __call__(self, x, between=lambda: None):
        """x: [T, D]; returns everything that was computed. between: called after each op"""
        made = []

        def then(*y):
            made.extend(y)
            between()
            return y[0] if len(y) == 1 else y

        y, stream = then(*ops.add_rms_norm(x, x, self.norm, 1e-6))
        y = then(ops.linear(y, self.up))
        y = then(ops.swiglu(y))
        y = then(ops.linear(y, self.down))
        y = then(ops.rms_norm(y, self.norm, 1e-6))
        y = then(ops.linear(y.view(len(y), 4, 512), self.short)).flatten(1)
        y = then(ops.int4_linear(y, self.packed, self.scale))
        y, stream = then(*ops.add_rms_norm(y, stream, self.norm, 1e-6))
        logits = then(ops.linear(y, self.gate, torch.float32))
        then(*ops.moe_route(logits, self.bias, None, experts_per_token=8, scale=2.0))
        return made


@pytest.mark.parametrize("T", [1, 8, 16, 40, 64])
def test_operands_written_just_before(T, device, rng):
    layer = Layer(device, rng)
    xs = [
        torch.randn(T, 2048, generator=rng).to(device, torch.bfloat16)
        for _ in range(20 if device.type == "cuda" else 2)
    ]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    want = [layer(x, wait) for x in xs]
    got = [layer(x) for x in xs]
    for one, other in zip(want, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(want[0][-1], want[1][-1])


@pytest.mark.parametrize("T", [1, 16])
def test_weights_written_just_before(T, device, rng):
    """Weights, too, may be what the kernel before wrote."""
    D = 1024
    x, more, left = (torch.randn(n, D, generator=rng).to(device, torch.bfloat16) for n in (T, D, D))
    want = ops.linear(x, ops.rms_norm(more, left[0], 1e-6)), ops.linear(x, ops.linear(more, left))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(50 if device.type == "cuda" else 1):
        assert torch.equal(ops.linear(x, ops.rms_norm(more, left[0], 1e-6)), want[0])
        assert torch.equal(ops.linear(x, ops.linear(more, left)), want[1])
