"""Norms and dense products."""

from collections.abc import Iterator
from functools import partial

import eager
import torch
import torch.nn.functional as F
from cases import EPS, Bench, Case, turning

from kdtree import ops


def rms_norm(b: Bench) -> Iterator[Case]:
    D = b.size.D
    for T in b.size.rows:
        x, w = b.rand(T, D), b.rand(D)
        eager_norm = partial(F.rms_norm, x, (D,), w, EPS)
        run = partial(ops.rms_norm, x, w, EPS)
        b.close("rms_norm", run(), eager_norm())
        yield Case({"T": T, "D": D}, run, 2 * T * D * b.e, 0, ("eager", eager_norm))


def add_rms_norm(b: Bench) -> Iterator[Case]:
    D = b.size.D
    for T in b.size.rows:
        operands = b.rand(T, D), b.rand(T, D), b.rand(D), EPS
        run, plain = partial(ops.add_rms_norm, *operands), partial(eager.add_rms_norm, *operands)
        for got, want in zip(run(), plain(), strict=True):
            b.close("add_rms_norm", got, want)
        yield Case({"T": T, "D": D}, run, 4 * T * D * b.e, 0, ("eager", plain))


def linear(b: Bench) -> Iterator[Case]:
    s, f32 = b.size, torch.float32
    shapes = [  # I, O, dtype of the weights, dtype of the outputs
        (s.D, s.Q + s.C + s.R, b.dtype, b.dtype),
        (s.Q, s.H * (s.P + s.R), b.dtype, b.dtype),
        (s.H * s.P, s.D, b.dtype, b.dtype),
        (s.D, s.dense, b.dtype, b.dtype),
        (s.D, s.E, f32, f32),
        (s.D, s.W, b.dtype, f32),
    ]
    for I, O, kind, out in shapes:
        weights = b.copies(b.rand(O, I, scale=I**-0.5, dtype=kind))
        for T in (*s.batches, *([s.prefill] if O < s.W and kind is not f32 else [])):
            x = b.rand(T, I)
            run = turning(lambda w, x=x, out=out: ops.linear(x, w, out), weights)
            plain = turning(partial(F.linear, x.to(kind)), weights)  # no conversion counts
            b.close("linear", run(), plain())
            moved = O * I * kind.itemsize + T * (I * b.e + O * out.itemsize)
            shape = {"T": T, "I": I, "O": O}
            name = "f32" if kind is f32 else "bf16"
            yield Case(shape, run, moved, 2 * T * I * O, ("torch", plain), weights=name)
    # The attention's queries into the latent space, and its outputs out of it: one product a head.
    for H in dict.fromkeys((s.H, 8)):  # all, and those of one GPU of eight
        for I, O in ((s.P, s.C), (s.C, s.P)):
            yield from _heads(b, H, I, O)


def _heads(b: Bench, H: int, I: int, O: int) -> Iterator[Case]:
    weights = b.copies(b.rand(H, O, I, scale=I**-0.5))
    for T in (*b.size.batches, b.size.prefill):
        x = b.rand(T, H, I)
        run = turning(partial(ops.linear, x), weights)
        plain = turning(partial(eager.heads, x), weights)
        b.close("linear", run(), plain().transpose(0, 1))
        moved = H * (O * I + T * (O + I)) * b.e
        shape = {"T": T, "H": H, "I": I, "O": O}
        yield Case(shape, run, moved, 2 * T * H * O * I, ("torch.bmm", plain), weights=b.name)


def swiglu(b: Bench) -> Iterator[Case]:
    for T in b.size.rows:
        x = b.rand(T, 2 * b.size.dense)
        run, plain = partial(ops.swiglu, x), partial(eager.swiglu, x)
        b.close("swiglu", run(), plain())
        shape = {"T": T, "F": b.size.dense}
        yield Case(shape, run, 3 * T * b.size.dense * b.e, 0, ("eager", plain))
