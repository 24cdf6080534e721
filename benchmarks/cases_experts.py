"""INT4 products, routing and routed experts."""

from collections.abc import Iterator
from functools import partial
from math import ceil

import eager
import torch
import torch.nn.functional as F
from cases import Bench, Case, turning
from torch import Tensor

from kdtree import ops

SETS = 8  # of experts that a row turns through, at least
CACHE = 128e6  # bytes: twice the second-level cache; what was read so long ago is read from memory


def int4_pack(b: Bench) -> Iterator[Case]:
    E, I, O = 8, b.size.D, 2 * b.size.F
    codes, scale = b.int4(E, O, I)
    x = b.rand(2, I)
    packed, packed_scale = ops.int4_pack(codes, scale)
    w = eager.int4_weights(codes[E - 1], scale[E - 1])
    b.close("int4_pack", ops.int4_linear(x, packed[-1], packed_scale[-1]), F.linear(x, w))
    moved = 2 * E * O * I * (0.5 + b.e / 32)
    yield Case({"E": E, "I": I, "O": O}, partial(ops.int4_pack, codes, scale), moved, 0)


def int4_linear(b: Bench) -> Iterator[Case]:
    s = b.size
    for I, O in ((s.D, s.dense), (s.H * s.P, s.D)):
        codes, scale = b.int4(O, I)
        w = eager.int4_weights(codes, scale)
        packed, packed_scale = ops.int4_pack(codes, scale)
        packs, scales, dense = b.copies(packed), b.copies(packed_scale), b.copies(w)
        scales = scales[: len(packs)]  # turn together
        for T in s.batches:
            x = b.rand(T, I)
            run = turning(partial(ops.int4_linear, x), packs, scales)
            plain = turning(partial(F.linear, x), dense)
            b.close("int4_linear", run(), plain())
            moved = O * I * (0.5 + b.e / 32) + T * (I + O) * b.e
            shape = {"T": T, "I": I, "O": O}
            yield Case(shape, run, moved, 2 * T * I * O, (f"torch {b.name}", plain), weights="int4")


def moe_route(b: Bench) -> Iterator[Case]:
    s = b.size
    for T in s.batches:
        logits = b.rand(T, s.E, dtype=torch.float32)
        bias = b.rand(s.E, scale=0.1, dtype=torch.float32)
        run = partial(ops.moe_route, logits, bias, None, experts_per_token=s.K, scale=2.5)
        plain = partial(eager.moe_route, logits, bias, s.K, 2.5)
        for got, want in zip(run(), plain(), strict=True):
            b.close("moe_route", got.float(), want)
        moved = 4 * (T * s.E + s.E + 2 * T * s.K)
        yield Case({"T": T, "E": s.E, "K": s.K}, run, moved, 0, ("eager", plain))


def moe_experts(b: Bench) -> Iterator[Case]:
    s = b.size
    yield from _moe_experts(b, s.E, s.F, (*s.batches, s.prefill), int4=True)
    yield from _moe_experts(b, s.E, s.shard, s.batches, int4=True)
    yield from _moe_experts(b, min(s.E, 32), s.F, s.rows, int4=False)


def _moe_experts(b: Bench, E: int, F_: int, batches: tuple[int, ...], int4: bool) -> Iterator[Case]:
    D, K = b.size.D, b.size.K
    if int4:
        shapes = (E, 2 * F_, D), (E, D, F_)
        codes = [b.int4(*shape) for shape in shapes]
        (up, up_scale), (down, down_scale) = (ops.int4_pack(*each) for each in codes)
        experts = [{e: eager.int4_weights(c[e], s[e]) for e in range(2 * K)} for c, s in codes]
        del codes
    else:
        up, down = b.rand(E, 2 * F_, D, scale=D**-0.5), b.rand(E, D, F_, scale=F_**-0.5)
        up_scale = down_scale = None
        experts = [up, down]
    few = [[(t + 2 * k) % (2 * K) for k in range(K)] for t in range(2)]
    x, weights = b.rand(2, D), torch.rand(2, K, device=b.device)
    got = ops.moe_experts(x, b.tensor(few), weights, up, down, up_scale, down_scale)
    b.close("moe_experts", got, eager.moe_experts(x, few, weights, *experts))
    del experts
    matrices = 3 * D * F_ * (0.5 + b.e / 32 if int4 else b.e)  # bytes of an expert
    for T in batches:
        x, weights = b.rand(T, D), torch.rand(T, K, device=b.device)
        apart = 1 if b.device.type == "cpu" else 1 + int(CACHE / (T * K * matrices))
        choices = expert_sets(T, E, K, apart, b.device)

        def run(ids, x=x, weights=weights):
            return ops.moe_experts(x, ids, weights, up, down, up_scale, down_scale)

        distinct = sum(len(ids.unique()) for ids in choices) / len(choices)
        moved, flops = distinct * matrices + 2 * T * D * b.e, 2 * T * K * 3 * D * F_
        shape = {"T": T, "D": D, "F": F_, "E": E, "K": K}
        name = "int4" if int4 else b.name
        baseline = None
        if T == b.size.prefill:
            one = partial(F.linear, b.rand(T * K, D), b.rand(3 * F_, D))
            baseline = f"torch {b.name}, one product of as many flops", one
        yield Case(shape, turning(run, choices), moved, flops, baseline, weights=name)


def expert_sets(T: int, E: int, K: int, apart: int, device: torch.device) -> list[Tensor]:
    """Ids [T, K] to turn through, of which `apart` in a row have no expert in common."""
    parts = torch.randperm(E, device=device, dtype=torch.int32).tensor_split(min(apart, E // K))
    return [
        part[torch.rand(T, len(part), device=device).topk(K).indices]
        for part in parts * ceil(SETS / len(parts))
    ]
