"""Training of the demo model: optimisers, fake quantisation, the clocked loop.

The learning rate follows the wall clock: constant, then linear to zero over the last 60 % of
`seconds`. For the last 35 % the routed experts are rounded to INT4 in the forward pass (the
gradient passes straight through), and `loop_rows` rows a batch repeat themselves. For the last
`long` of the time windows are four times as long. Files are not known here.
"""

import math
import sys
import time
from collections import deque

import torch
from torch import Tensor

from demo_training.batches import add_loops, batches, objective
from demo_training.model import Parts, forward
from demo_training.muon import Muon
from demo_training.plan import LONG, Plan, Run
from demo_training.quantize import dequantize, quantize
from demo_training.shape import Weights, rotary

ADAM = ("embed", "head", "norm", "input_norm", "post_norm", "q_norm", "kv_norm", "router")


class Trainer:
    """One run over one GPU (or a CPU, to try)."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self.plan, self.weights, self.run = plan, weights, Run()
        self.device = weights.embed.device
        plain = self.device.type == "cpu" and not plan.compiled
        self.low = torch.float32 if plain else torch.bfloat16
        self.parts = Parts.make(plan.compiled)
        self.quantize = torch.compile(quantize, dynamic=False) if plan.compiled else quantize
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
    def experts(self, quantized: bool) -> None:
        """Sets the working copy of the routed experts from the trained ones."""
        for name, copy in self.routed.items():
            trained = getattr(self.weights, name)
            copy.copy_(dequantize(*self.quantize(trained)) if quantized else trained)

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
        late = part >= 1 - plan.quantized
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
            for quantized in (False, True):
                self.experts(quantized)
                self.backward(batch, quantized)
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
