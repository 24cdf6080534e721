"""A block drafter's own ops: a block of 8 slots, up to 8 query heads to a key head, 6 layers."""

from collections.abc import Iterator
from functools import partial

import eager
import torch
from cases import EPS, Bench, Case, turning

from kdtree import ops

SLOTS, LAYERS = 8, 6


def heads(b: Bench) -> tuple[int, int, int]:
    """Query heads, key heads and their width."""
    return b.size.H, min(8, b.size.H // 4), b.size.P


def turn(b: Bench, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's weight and the rotation table of heads."""
    width = heads(b)[2]
    angle = torch.rand(positions, width // 2, device=b.device) * 6.3
    return 1 + b.rand(width, scale=0.1), torch.cat([angle.cos(), angle.sin()], 1)


def block_embed(b: Bench) -> Iterator[Case]:
    W, D = b.size.W, b.size.D
    token, length = b.ints(1, 100, high=W, dtype=torch.int64), b.tensor([60])
    table, mask = b.rand(W, D), b.rand(D)
    run = partial(ops.block_embed, token, length, table, mask, SLOTS, 1.0)
    plain = partial(eager.block_embed, token, length, table, mask, SLOTS)
    b.close("block_embed", run(), plain())
    yield Case({"B": 1, "N": SLOTS, "D": D}, run, (SLOTS + 2) * D * b.e, 0, ("eager", plain))


def block_attention(b: Bench) -> Iterator[Case]:
    H, G, width = heads(b)
    for S in b.size.contexts:
        norm, rope = turn(b, S + SLOTS)
        qkv, caches = b.rand(1, SLOTS, H + 2 * G, width), b.copies(b.rand(1, S, 2, G, width))
        length, scale = b.tensor([S]), width**-0.5

        def ours(cache, qkv=qkv, norm=norm, rope=rope, length=length, scale=scale):
            return ops.block_attention(qkv, norm, norm, EPS, rope, cache, length, 0, False, scale)

        def theirs(cache, qkv=qkv, norm=norm, rope=rope):
            return eager.block_attention(qkv, norm, EPS, rope, cache)

        run, plain = turning(ours, caches), turning(theirs, caches)
        b.close("block_attention", run(), plain())
        moved = 2 * ((S + SLOTS) * G + SLOTS * H) * width * b.e
        flops = 4 * SLOTS * H * (S + SLOTS) * width
        yield Case({"B": 1, "H": H, "S": S, "N": SLOTS}, run, moved, flops, ("eager", plain))


def block_append(b: Bench) -> Iterator[Case]:
    _, G, width = heads(b)
    rows, start = [512] * LAYERS, 100
    norm, rope = turn(b, 512)
    norms = norm.repeat(LAYERS, 1)
    for J in (SLOTS, 256):
        cache = torch.zeros(512 * LAYERS, 2, G, width, device=b.device, dtype=b.dtype)
        kv = b.rand(1, J, LAYERS, 2, G, width)
        given = kv, norms, EPS, rope, b.tensor([start]), b.tensor([[*range(J)]]), b.tensor([J])
        run = partial(ops.block_append, cache, *given, rows, 0)
        plain = partial(eager.block_append, cache, kv, norm, EPS, rope, start)
        plain()
        want = cache.clone()
        cache.zero_()
        run()
        b.close("block_append", cache, want)
        moved = 4 * J * LAYERS * G * width * b.e
        yield Case({"B": 1, "J": J, "L": LAYERS}, run, moved, 0, ("eager", plain))


def block_conv(b: Bench) -> Iterator[Case]:
    D, taps = b.size.D, 4
    x, dynamic, base = b.rand(SLOTS, D), b.rand(SLOTS, taps, D // 64), b.rand(taps, D)
    run = partial(ops.block_conv, x, dynamic, base, SLOTS)
    plain = partial(eager.block_conv, x, dynamic, base)
    b.close("block_conv", run(), plain())
    moved = (2 * SLOTS + taps) * D * b.e
    yield Case({"T": SLOTS, "D": D, "taps": taps}, run, moved, 0, ("eager", plain))


def edge_scores(b: Bench) -> Iterator[Case]:
    W, J, R = b.size.W, SLOTS - 1, 32
    before, after = b.rand(W, R, scale=R**-0.5), b.rand(W, R)
    for M in (16, 64):
        candidate = torch.stack([torch.randperm(W, device=b.device)[:M] for _ in range(J)])[None]
        score = b.rand(1, J, M, scale=3, dtype=torch.float32).log_softmax(-1)
        one, direction = torch.ones(J, device=b.device), b.rand(1, J, R, dtype=torch.float32)
        known = candidate[0, :1].clone(), b.tensor([5])
        law = torch.ones(1, device=b.device), one, one * 0.2
        run = partial(
            ops.edge_scores, score, candidate, *known, *law, None, one, direction, before, after
        )
        root = int(known[0][0, 4])
        plain = partial(eager.edge_scores, score, candidate, root, 1.2, direction, before, after)
        b.close("edge_scores", run(), plain())
        moved = J * M * (2 * R * b.e + 4 * M)
        yield Case({"B": 1, "J": J, "M": M, "R": R}, run, moved, 0, ("eager", plain))
