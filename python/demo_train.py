"""Training of the demo model: data order, optimisers, fake quantisation, the clocked loop.

The learning rate follows the wall clock: constant, then linear to zero over the last 60 % of
`seconds`. For the last 35 % the routed experts are rounded to INT4 in the forward pass (the
gradient passes straight through), and `loop_rows` rows a batch are windows whose end repeats
itself: there the third and later repeats are taught to be half as likely as the one before, so
that greedy output leaves a loop (after Xu et al. 2022, "Learning to Break the Loop"). For the
last `long` of the time windows are four times as long. Files are not known here.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from demo_model import Parts, forward
from demo_shape import Weights, rotary

ADAM = ("embed", "head", "norm", "input_norm", "post_norm", "q_norm", "kv_norm", "router")
GROUP = 32  # weights that share an INT4 scale
LONG = 4  # long windows are so many times as long


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is told. Times in seconds, of training alone; parts are of `seconds`."""

    seconds: float
    seed: int = 0
    batch: int = 64
    length: int = 1024
    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    decay: float = 0.1
    balance: float = 1e-3
    warm_steps: int = 100
    cool: float = 0.6
    quantised: float = 0.35
    long: float = 0.12
    loop_rows: int = 2
    way: str = "grouped"
    backend: str = "flash"
    compiled: bool = True


@dataclass(slots=True)
class Run:
    """What a run has done so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict] = field(default_factory=list)
    failure: str = ""


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """INT4 codes [..., groups, 32] and scales [..., groups, 1], chosen by squared error."""
    w = w.float().unflatten(-1, (-1, GROUP))
    largest = w.abs().amax(-1, keepdim=True).clamp(min=1e-8)
    best = scale = code = None
    for steps in (6.2, 6.6, 7.0, 7.4, 7.8, 8.2, 8.7, 9.3, 10.0):
        s = (largest / steps).bfloat16().float()
        q = (w / s).round().clamp(-8, 7)
        error = (q * s - w).square().sum(-1, keepdim=True)
        if best is None:
            best, scale, code = error, s, q
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, s, scale)
        code = torch.where(better, q, code)
    return code, scale


def dequantise(code: Tensor, scale: Tensor) -> Tensor:
    return (code * scale).flatten(-2)


def orthogonal(m: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each of m [N, out, in], roughly (Newton-Schulz)."""
    x = m.bfloat16() if m.is_cuda else m
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, for stacks of matrices; the step's size is as AdamW's."""

    def __init__(self, tensors: list[Tensor], matrices: list[tuple[int, int]]) -> None:
        self.tensors, self.matrices = tensors, matrices
        self.momentum = [torch.zeros_like(x) for x in tensors]

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float, decay: float) -> None:
        torch._foreach_lerp_(self.momentum, [g.float() for g in grads], 0.05)
        for x, (out, inside), m, g in zip(
            self.tensors, self.matrices, self.momentum, grads, strict=True
        ):
            update = orthogonal(torch.lerp(g.float(), m, 0.95).view(-1, out, inside)).view_as(x)
            x.mul_(1 - lr * decay).add_(update, alpha=-0.2 * max(out, inside) ** 0.5 * lr)


def batches(data: Tensor, plan: Plan, long: deque[bool]) -> Iterator[Tensor]:
    """Windows [B, T + 1] of every epoch in a shuffled order; long ones once `long` holds True."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        length = plan.length * (LONG if long else 1)
        batch = plan.batch // (LONG if long else 1)
        offset = int(torch.randint(length, (1,), generator=generator))
        count = (len(data) - 1 - offset) // length
        starts = (torch.randperm(count, generator=generator) * length + offset).to(data.device)
        reach, was = torch.arange(length + 1, device=data.device), len(long)
        for at in range(0, count - batch + 1, batch):
            yield data[starts[at : at + batch, None] + reach].long()
            if len(long) != was:
                break


def add_loops(
    batch: Tensor, rows: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes the last rows repeat themselves; returns the batch, and of the targets [rows, T] the
    number of the repeat they are in (0: none) and the position one period before."""
    length, device = batch.shape[1], batch.device
    period = torch.randint(4, 64, (rows, 1), generator=generator, device=device)
    begin = torch.randint(length // 8, length // 2, (rows, 1), generator=generator, device=device)
    at = torch.arange(length, device=device).expand(rows, -1)
    source = torch.where(at < begin, at, begin + (at - begin) % period)
    looped = torch.cat((batch[:-rows], batch[-rows:].gather(1, source)))
    repeat = ((at - begin).clamp(min=0) // period)[:, 1:]
    return looped, repeat, (at[:, 1:] - 1 - period).clamp(min=0)


def objective(loss: Tensor, repeat: Tensor | None, before: Tensor | None) -> Tensor:
    """Mean of -log p; in looped rows only up to the first repeat, and from the second on the
    distance from half the probability one period before."""
    if repeat is None:
        return loss.mean()
    rows = len(repeat)
    looped = loss[-rows:]
    p = torch.exp(-looped)
    goal = 0.5 * p.detach().gather(1, before)
    escape = -torch.log1p(-(p - goal).abs().clamp(max=0.999))
    looped = torch.where(repeat >= 2, escape, torch.where(repeat == 0, looped, 0.0))
    return (loss[:-rows].sum() + looped.sum()) / loss.numel()


class Trainer:
    """One run over one GPU (or a CPU, to try)."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self.plan, self.weights, self.run = plan, weights, Run()
        self.device = weights.embed.device
        plain = self.device.type == "cpu" and not plan.compiled
        self.low = torch.float32 if plain else torch.bfloat16
        self.parts = Parts.make(plan.compiled)
        self.quantise = torch.compile(quantise, dynamic=False) if plan.compiled else quantise
        self.angles = rotary(weights.shape, plan.length * LONG, self.device)
        named = dict(weights.named_parameters())
        self.adam = torch.optim.AdamW(
            [
                dict(params=[p], weight_decay=0.0 if "norm" in n else plan.decay)
                for n, p in named.items()
                if n in ADAM
            ],
            lr=plan.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=self.device.type == "cuda",
        )
        self.matrices = [n for n in named if n not in ADAM]
        s, tensors = weights.shape, [named[n].detach() for n in self.matrices]
        shapes = {n: tuple(named[n].shape[-2:]) for n in self.matrices}
        shapes["experts_in"] = s.expert, s.hidden  # gate and up apart
        self.muon = Muon(tensors, list(shapes.values()))
        self.routed = {
            n: torch.empty_like(named[n], dtype=self.low, requires_grad=True)
            for n in ("experts_in", "experts_out")
        }
        self.random = torch.Generator(self.device).manual_seed(plan.seed)
        self.good = {n: t.clone() for n, t in weights.state_dict().items()}

    @torch.no_grad()
    def experts(self, quantised: bool) -> None:
        """Sets the working copy of the routed experts from the trained ones."""
        for name, copy in self.routed.items():
            trained = getattr(self.weights, name)
            copy.copy_(dequantise(*self.quantise(trained)) if quantised else trained)

    def losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        w, plan = self.weights, self.plan
        x, loads = forward(
            self.parts,
            w,
            self.routed["experts_in"],
            self.routed["experts_out"],
            batch[:, :-1],
            self.angles,
            plan.backend,
            plan.way,
        )
        loss = self.parts.loss(
            w.shape, x, w.norm.to(self.low), w.head.to(self.low), batch[:, 1:].flatten()
        )
        return loss.view(len(batch), -1), loads

    def backward(self, batch: Tensor, loops: bool) -> tuple[Tensor, Tensor]:
        repeat = before = None
        rows = -(-self.plan.loop_rows * len(batch) // self.plan.batch)  # fewer of the long ones
        if loops and rows:
            batch, repeat, before = add_loops(batch, rows, self.random)
        loss, loads = self.losses(batch)
        objective(loss, repeat, before).backward()
        plain = loss[:-rows] if repeat is not None else loss
        return plain.detach().mean(), loads

    def step(self, batch: Tensor, part: float) -> tuple[Tensor, Tensor]:
        """One update at `part` of the time."""
        plan = self.plan
        rate = min(1.0, (self.run.steps + 1) / plan.warm_steps, (1 - part) / plan.cool)
        late = part >= 1 - plan.quantised
        self.experts(late)
        loss, loads = self.backward(batch, late)
        for group in self.adam.param_groups:
            group["lr"] = plan.adam_lr * rate
        self.adam.step()
        grads = [
            self.routed[n].grad if n in self.routed else getattr(self.weights, n).grad
            for n in self.matrices
        ]
        self.muon.step(grads, plan.muon_lr * rate, plan.decay)
        self.clear()
        load = loads.float()
        self.weights.bias += plan.balance * rate * torch.sign(load.mean(1, keepdim=True) - load)
        self.run.steps += 1
        self.run.tokens += batch.shape[0] * (batch.shape[1] - 1)
        return loss, loads

    def clear(self) -> None:
        self.weights.zero_grad(set_to_none=True)
        for copy in self.routed.values():
            copy.grad = None

    def warm_up(self) -> None:
        """Compiles everything that a run needs, with random tokens."""
        sizes = {1, LONG} if self.plan.long else {1}
        for longer in sorted(sizes):
            shape = (self.plan.batch // longer, self.plan.length * longer + 1)
            batch = torch.randint(self.weights.shape.words, shape, device=self.device)
            for quantised in (False, True):
                self.experts(quantised)
                self.backward(batch, quantised)
                self.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def train(self, data: Tensor) -> Run:
        """Trains on data [tokens] for plan.seconds; a failure ends it early and is recorded."""
        plan, run, long, marks = self.plan, self.run, deque(), deque()
        start = last = time.perf_counter()
        try:
            for batch in batches(data, plan, long):
                run.seconds = time.perf_counter() - start
                part = run.seconds / plan.seconds
                if part >= 1:
                    break
                if part >= 1 - plan.long and not long:
                    long.append(True)
                loss, loads = self.step(batch, part)
                wait_behind(marks, self.device)
                if run.steps <= 3 or run.steps % 100 == 0 or time.perf_counter() - last > 5:
                    self.report(float(loss), loads, start)
                    last = time.perf_counter()
        except (RuntimeError, KeyboardInterrupt, ArithmeticError) as error:
            run.failure = f"{type(error).__name__}: {error}"
            print(f"stopped: {run.failure}", file=sys.stderr, flush=True)
        self.clear()
        return run

    def report(self, loss: float, loads: Tensor, start: float) -> None:
        run, now = self.run, time.perf_counter() - start
        if not math.isfinite(loss):
            self.weights.load_state_dict(self.good)
            raise ArithmeticError(f"the loss is {loss} at step {run.steps}")
        if run.steps % 500 == 0:
            self.good = {n: t.clone() for n, t in self.weights.state_dict().items()}
        load = loads.float()
        uneven = float((load.amax(1) / load.mean(1)).mean())
        run.curve.append(
            dict(step=run.steps, seconds=round(now, 1), loss=round(loss, 4), load=round(uneven, 2))
        )
        end = "\r" if sys.stdout.isatty() else "\n"
        if sys.stdout.isatty() or run.steps <= 3 or run.steps % 500 == 0:
            print(
                f"{now:6.1f} s  step {run.steps:6d}  loss {loss:6.4f}  load max/mean {uneven:.2f}"
                f"  {run.tokens / now / 1e6:5.3f} M tokens/s",
                end=end,
                flush=True,
            )


def wait_behind(marks: deque, device: torch.device) -> None:
    """Keeps the host at most eight steps ahead of the GPU, so that the clock means something."""
    if device.type == "cuda":
        marks.append(torch.cuda.Event())
        marks[-1].record()
        if len(marks) > 8:
            marks.popleft().synchronize()
