"""Kernels that begin before the one before has ended wait for what it writes: rows of ops, each of
which reads what the one before wrote, launched one right after the other and one by one."""

import pytest
import torch

from kdtree import ops

D, Q, H, P, C, R = 2048, 1024, 8, 128, 512, 64  # hidden, query, heads, nope, latent, rope
E, K, F = 96, 8, 256
POSITIONS = 300  # before the row's


class Layer:
    """The ops of an MoE layer, in its order, and a draw from what comes out."""

    def __init__(self, device, rng):
        def weight(*shape, dtype=torch.bfloat16):
            return (torch.randn(*shape, generator=rng) / shape[-1] ** 0.5).to(device, dtype)

        def int4(*shape):
            codes = torch.randint(-(2**31), 2**31, (*shape[:-1], shape[-1] // 8), generator=rng)
            scale = weight(*shape[:-1], shape[-1] // 32).abs() / 8
            return ops.int4_pack(codes.int().to(device), scale)

        self.norm, self.latent_norm = weight(D), weight(C)
        self.qkv, self.q_norm, self.q_up = weight(Q + C + R, D), weight(Q), weight(H * (P + R), Q)
        self.w_uk, self.w_uv, self.out = weight(H, C, P), weight(H, P, C), weight(D, H * P)
        self.rope = torch.randn(1024, R, generator=rng).to(device)
        self.gate, self.bias = weight(E, D, dtype=torch.float32), weight(E, dtype=torch.float32)
        self.up, self.down = weight(2 * F, D), weight(D, F)
        self.experts_up, self.up_scale = int4(E, 2 * F, D)
        self.experts_down, self.down_scale = int4(E, D, F)
        self.mixed, self.mixed_scale = int4(D, D)
        self.head = weight(4096, D)
        self.before = weight(16, 64, C + R)  # pages of latents
        self.table = torch.arange(16, dtype=torch.int32, device=device)[None]

    def __call__(self, x, between=lambda: None):
        """x: [T, D]; returns everything that was computed. between: called after each op"""
        made, T, device = [], len(x), x.device

        def then(*y):
            made.extend(y)
            between()
            return y[0] if len(y) == 1 else y

        position = torch.arange(T, dtype=torch.int32, device=device) + POSITIONS
        context = torch.full((1,), POSITIONS, dtype=torch.int32, device=device)
        cache = self.before.clone()
        y, stream = then(*ops.add_rms_norm(x, x, self.norm, 1e-6))
        query, latent = then(ops.linear(y, self.qkv)).split([Q, C + R], 1)
        query = then(ops.linear(then(ops.rms_norm(query, self.q_norm, 1e-6)), self.q_up))
        query = query.view(T, H, P + R)
        rows = latent, self.latent_norm, 1e-6, self.rope, position, position, True
        query = then(ops.mla_query_append(cache, query, self.w_uk, *rows))[None]
        attended = (query, cache, self.table, context, None, C, 0.05)
        y = then(ops.linear(then(ops.mla_attention(*attended))[0], self.w_uv))
        y = then(ops.linear(y.flatten(1), self.out))
        y, stream = then(*ops.add_rms_norm(y, stream, self.norm, 1e-6))
        logits = then(ops.linear(y, self.gate, torch.float32))
        route = then(*ops.moe_route(logits, self.bias, None, experts_per_token=K, scale=2.0))
        shared = then(ops.linear(then(ops.swiglu(then(ops.linear(y, self.up)))), self.down))
        banks = self.experts_up, self.experts_down, self.up_scale, self.down_scale
        y = then(ops.moe_experts(y, *route, *banks, shared))
        y = then(ops.int4_linear(y, self.mixed, self.mixed_scale))
        y, _ = then(*ops.add_rms_norm(y, stream, self.norm, 1e-6))
        logits = then(ops.linear(y, self.head, torch.float32))[None]
        then(*self.round(logits, position[None]))
        return made

    def round(self, logits, position):
        """The draws, and the walk over the chain that was drawn."""
        T, device = logits.shape[1], logits.device
        one = torch.ones(1, device=device)
        drawn, logprob, finite = ops.sample(
            logits, position, one.long(), one, one.int() * 0, one, one * 0, None
        )
        token = torch.cat([drawn[:, :1], drawn[:, :-1]], 1)
        parent = torch.arange(-1, T - 1, dtype=torch.int32, device=device)[None]
        return drawn, *ops.tree_accept(token, parent, drawn, finite, logprob)


@pytest.mark.parametrize("T", [1, 2, 8, 16, 40, 64])
def test_operands_written_just_before(T, device, rng):
    layer = Layer(device, rng)
    xs = [
        torch.randn(T, D, generator=rng).to(device, torch.bfloat16)
        for _ in range(20 if device.type == "cuda" else 2)
    ]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    want = [layer(x, wait) for x in xs]
    got = [layer(x) for x in xs]
    for one, other in zip(want, got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert all(a.isfinite().all() for a in one if a.is_floating_point())
    others = [not torch.equal(a, b) for a, b in zip(want[0], want[1], strict=True)]
    assert sum(others) > 20  # not the one row's position, and the like


@pytest.mark.parametrize("T", [1, 16])
def test_weights_written_just_before(T, device, rng):
    """Weights, too, may be what the kernel before wrote."""
    x, more, left = (torch.randn(n, Q, generator=rng).to(device, torch.bfloat16) for n in (T, Q, Q))
    want = ops.linear(x, ops.rms_norm(more, left[0], 1e-6)), ops.linear(x, ops.linear(more, left))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(50 if device.type == "cuda" else 1):
        assert torch.equal(ops.linear(x, ops.rms_norm(more, left[0], 1e-6)), want[0])
        assert torch.equal(ops.linear(x, ops.linear(more, left)), want[1])
