"""Attention over the latent cache."""

from collections.abc import Iterator
from functools import partial

import eager
import numpy as np
import torch
from cases import EPS, Bench, Case, turning

from kdtree import ops


def mla_query(b: Bench) -> Iterator[Case]:
    s, rope = b.size, b.rope()
    for H in dict.fromkeys((s.H, 8)):  # all, and those of one GPU of eight
        w = b.rand(H, s.C, s.P, scale=s.P**-0.5)
        weights = b.copies(w)
        for T in (*s.batches, s.prefill):
            q, position = b.rand(T, H, s.P + s.R), b.ints(T, high=len(rope))
            run = turning(lambda w, q=q, p=position: ops.mla_query(q, w, rope, p, False), weights)
            b.close("mla_query", run(), eager.mla_query(q, w, rope, position))
            plain = turning(partial(eager.heads, q[..., : s.P]), weights)
            moved = H * (s.C * s.P + T * (s.P + s.C + 2 * s.R)) * b.e
            shape = {"T": T, "H": H, "P": s.P, "C": s.C, "R": s.R}
            baseline = "torch.bmm, no rotation", plain
            yield Case(shape, run, moved, 2 * T * H * s.C * s.P, baseline, weights=b.name)


def mla_append(b: Bench) -> Iterator[Case]:
    s, rope = b.size, b.rope()
    for T in s.rows:
        cache = torch.zeros(4, 64, s.C + s.R, device=b.device, dtype=b.dtype)
        kv, w, slot = b.rand(T, s.C + s.R), b.rand(s.C), b.tensor(range(70, 70 + T))
        head = kv, w, EPS, rope, b.ints(T, high=len(rope)), slot
        run, plain = (
            partial(ops.mla_append, cache, *head, False),
            partial(eager.mla_append, cache, *head),
        )
        plain()
        want = cache.clone()
        cache.zero_()
        run()
        b.close("mla_append", cache, want)
        moved = 2 * T * (s.C + s.R) * b.e
        yield Case({"T": T, "C": s.C, "R": s.R}, run, moved, 0, ("eager", plain))


def mla_query_append(b: Bench) -> Iterator[Case]:
    s, rope = b.size, b.rope()
    for H in dict.fromkeys((s.H, 8)):
        w = b.rand(H, s.C, s.P, scale=s.P**-0.5)
        weights = b.copies(w)
        for T in (*s.batches, s.prefill):
            cache = torch.zeros(T // 64 + 2, 64, s.C + s.R, device=b.device, dtype=b.dtype)
            q, kv, norm = b.rand(T, H, s.P + s.R), b.rand(T, s.C + s.R), b.rand(s.C)
            tail = rope, b.ints(T, high=len(rope)), b.tensor(range(1, T + 1))

            def run(w, cache=cache, q=q, head=(kv, norm, EPS, *tail)):
                return ops.mla_query_append(cache, q, w, *head, False)

            def both(w, cache=cache, q=q, head=(kv, norm, EPS, *tail)):
                ops.mla_append(cache, *head, False)
                return ops.mla_query(q, w, *head[3:5], False)

            want, got = both(w), cache.clone()
            cache.zero_()
            b.close("mla_query_append", run(w), want)
            b.close("mla_query_append", cache, got)
            moved = (H * (s.C * s.P + T * (s.P + s.C + 2 * s.R)) + 2 * T * (s.C + s.R)) * b.e
            shape = {"T": T, "H": H, "P": s.P, "C": s.C, "R": s.R}
            flops, baseline = 2 * T * H * s.C * s.P, ("both ops", turning(both, weights))
            yield Case(shape, turning(run, weights), moved, flops, baseline, weights=b.name)


def mla_attention(b: Bench) -> Iterator[Case]:
    s = b.size
    for H in dict.fromkeys((s.H, 8)):  # all, and those of one GPU of eight
        for S in s.cached:
            for N in s.nodes:
                for tree in (True, False):
                    yield _attention(b, H, S, N, tree)
    yield _attention(b, s.H, s.contexts[0] // 2, s.contexts[0] // 8, tree=False)  # prefill


def _attention(b: Bench, H: int, S: int, N: int, tree: bool) -> Case:
    s = b.size
    Z, pages = s.C + s.R, -(-(S + N) // 64)
    q, caches = b.rand(1, N, H, Z), [b.rand(pages, 64, Z)]
    if b.device.type == "cuda":
        caches += [caches[0].clone() for _ in range(3)]
    table = b.tensor([list(range(pages))[::-1]])
    words, mask = _ancestors(N) if tree else (None, np.tri(N, dtype=bool))
    mask = torch.cat([torch.ones(N, S, dtype=torch.bool), torch.from_numpy(mask)], 1).to(b.device)
    words = b.tensor([words], torch.int64) if tree else None
    context, scale = b.tensor([S]), Z**-0.5
    order = table[0].long()
    run = turning(lambda c: ops.mla_attention(q, c, table, context, words, s.C, scale), caches)
    plain = turning(lambda c: eager.mla_attention(q, c, order, mask, s.C, scale), caches)
    b.close("mla_attention", run(), plain())
    moved = ((S + N) * Z + N * H * (Z + s.C)) * b.e
    flops = 2 * H * int(mask.sum()) * (Z + s.C)
    shape = {"B": 1, "H": H, "S": S, "N": N}
    return Case(shape if tree else shape | {"chain": 1}, run, moved, flops, ("eager", plain))


def _ancestors(N: int) -> tuple[list[int], np.ndarray]:
    """A tree whose node n hangs under n / 2: ancestor words, and the mask that they say."""
    words = [1]
    for n in range(1, N):
        words.append(words[n // 2] | 1 << n)
    mask = np.array([[word >> m & 1 for m in range(N)] for word in words], dtype=bool)
    return [word - 2**64 if word >= 2**63 else word for word in words], mask


def kv_compact(b: Bench) -> Iterator[Case]:
    s, J, S = b.size, 8, 100
    cache = b.rand(s.L, 4, 64, s.C + s.R)
    path = [2 * i for i in range(J)]  # the root stays, seven rows move
    table, context = b.tensor([[0, 1, 2, 3]]), b.tensor([S])
    run = partial(ops.kv_compact, cache, table, context, b.tensor([path]), b.tensor([J]))
    source, target = b.tensor([S + n for n in path[1:]]), b.tensor(range(S + 1, S + J))
    want = cache.clone()
    eager.kv_compact(want, source, target)
    run()
    b.close("kv_compact", cache, want)
    moved = 2 * s.L * (J - 1) * (s.C + s.R) * b.e
    plain = partial(eager.kv_compact, cache, source, target)
    yield Case({"L": s.L, "B": 1, "J": J, "Z": s.C + s.R}, run, moved, 0, ("eager", plain))
