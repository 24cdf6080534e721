"""Training of the drafter: its loss, optimisers, fake quantisation, the clocked loop.

The loss of a slot is the cross-entropy against the target's own distribution; later slots weigh
less. From `select` of the time on the selector learns too: the same loss with its edge from the
true token before added to the (detached) logits. For the last `quantized` of the time the matrices
are rounded to INT4 in the forward pass. Files are not known here.
"""

import math
import sys
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.drafter_model import (
    MATRICES,
    SELECTOR,
    DraftWeights,
    Pieces,
    ahead,
    edge,
    forward,
)
from demo_training.drafter_target import Target
from demo_training.drafter_text import Text, anchor_weights
from demo_training.muon import Muon
from demo_training.plan import Run
from demo_training.quantize import dequantize, quantize
from demo_training.train import wait_behind


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a run is told. Times in seconds, of training alone; parts are of `seconds`.

    rows: tokens of a batch's sequences; anchors: blocks a 512 tokens of them; joint: how much of
    the selector's gradient reaches the drafter; long: one batch in so many is of long sequences
    """

    seconds: float
    seed: int = 0
    rows: int = 32768
    anchors: int = 64
    muon_lr: float = 4e-3
    adam_lr: float = 2e-3
    decay: float = 0.1
    gamma: float = 4.0
    warm_steps: int = 100
    cool: float = 0.6
    quantized: float = 0.35
    select: float = 0.25
    joint: float = 0.3
    long: int = 8
    cohorts: int = 3
    compiled: bool = True


def soft_loss(logits: Tensor, goal: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over [n, J] of the cross-entropy of logits against softmax(goal), [n, J, W]."""
    logits, p = logits.float(), goal.float().softmax(-1)
    loss = logits.logsumexp(-1) - (p * logits).sum(-1)
    return (loss * weight).mean(0).sum()


def draft_loss(hidden: Tensor, last: Tensor, head: Tensor, weight: Tensor) -> Tensor:
    """hidden, last [n, J, D], head [W, D] of one dtype; weight [J]"""
    with torch.no_grad():
        goal = F.linear(last, head)
    return soft_loss(F.linear(hidden, head), goal, weight)


def select_loss(
    hidden: Tensor, last: Tensor, head: Tensor, weight: Tensor, u: Tensor, after: Tensor
) -> Tensor:
    """The loss with the selector's edges, u [n, J, r] of the token before; after [W, r]."""
    with torch.no_grad():
        goal, base = F.linear(last, head), F.linear(hidden, head)
    return soft_loss(base + F.linear(u, after), goal, weight)


class DraftTrainer:
    """One run over one GPU (or a CPU, to try)."""

    def __init__(self, plan: DraftPlan, weights: DraftWeights, target: Target) -> None:
        self.plan, self.weights, self.target, self.run = plan, weights, target, Run()
        self.device = target.device
        self.kind = target.low
        self.head, self.embed = target.head.to(self.kind), target.embed
        named = dict(weights.named_parameters())
        self.adam = torch.optim.AdamW(
            [p for n, p in named.items() if n not in MATRICES],
            lr=plan.adam_lr,
            betas=(0.9, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )
        tensors = [named[n].detach() for n in MATRICES]
        self.muon = Muon(tensors, [tuple(x.shape[-2:]) for x in tensors])
        self.low = {
            n: torch.empty_like(named[n], dtype=self.kind, requires_grad=True) for n in MATRICES
        }
        slot = torch.arange(weights.shape.slots, device=self.device)
        self.weight = torch.exp(-slot / plan.gamma)
        self.weight /= self.weight.sum()
        self.random = torch.Generator(self.device).manual_seed(plan.seed)
        self.good = {n: t.clone() for n, t in weights.state_dict().items()}
        self.set_pieces(plan.compiled)

    def set_pieces(self, compiled: bool) -> None:
        self.compiled, self.pieces = compiled, Pieces.make(compiled)
        made = (draft_loss, select_loss, quantize)
        if compiled:
            made = tuple(torch.compile(f, dynamic=False, fullgraph=True) for f in made)
        self.draft_loss, self.select_loss, self.quantize = made

    @torch.no_grad()
    def refresh(self, quantized: bool) -> None:
        """Sets the working copy of the matrices from the trained ones."""
        trained = [getattr(self.weights, n) for n in self.low]
        if quantized:  # all at once: one graph, one kernel
            flat = dequantize(*self.quantize(torch.cat([x.flatten() for x in trained])))
            trained = flat.split([x.numel() for x in trained])
        for copy, x in zip(self.low.values(), trained, strict=True):
            copy.copy_(x.view_as(copy))

    def hidden(self, text: Text, anchor: Tensor) -> Tensor:
        """[n, A, J, D] of blocks at anchors [n, A] of a text's sequences."""
        return forward(
            self.pieces, self.weights, self.low, self.embed, text.tokens, text.taps, anchor
        )

    def backward(self, text: Text, anchor: Tensor, select: bool) -> Tensor:
        """Gradients of a batch; returns the drafter's loss."""
        slots = self.weights.shape.slots
        hidden = self.hidden(text, anchor)
        last = ahead(text.last, anchor, slots, 0)
        loss = self.draft_loss(hidden.flatten(0, 1), last.flatten(0, 1), self.head, self.weight)
        total = loss
        if select:  # on one anchor in four: it costs as much again
            part = slice(0, max(1, anchor.shape[1] // 4))
            h, last = (x[:, part].flatten(0, 1) for x in (hidden, last))
            before = ahead(text.tokens, anchor[:, part], slots, 0).flatten(0, 1)
            joint = self.plan.joint
            u = edge(self.weights, h.float() * joint + h.detach().float() * (1 - joint), before)
            after = self.weights.after.to(self.kind)
            total = loss + self.select_loss(
                h.detach(), last, self.head, self.weight, u.to(self.kind), after
            )
        total.backward()
        return loss.detach()

    def step(self, text: Text, anchor: Tensor, part: float) -> Tensor:
        """One update at `part` of the time."""
        plan = self.plan
        rate = min(1.0, (self.run.steps + 1) / plan.warm_steps, (1 - part) / plan.cool)
        self.refresh(part >= 1 - plan.quantized)
        loss = self.backward(text, anchor, part >= plan.select)
        for group in self.adam.param_groups:
            group["lr"] = plan.adam_lr * rate
        self.adam.step()
        self.muon.step([self.low[n].grad for n in MATRICES], plan.muon_lr * rate, plan.decay)
        self.clear()
        self.run.steps += 1
        self.run.tokens += anchor.numel()
        return loss

    def clear(self) -> None:
        self.weights.zero_grad(set_to_none=True)
        for copy in self.low.values():
            copy.grad = None

    def batch(self, text: Text, weight: Tensor) -> tuple[Text, Tensor]:
        """Sequences of a part and anchors in them, [n, A]; weight: of anchors [., T]."""
        t = text.tokens.shape[1]
        n = max(1, self.plan.rows // t)
        index = torch.randint(len(text), (n,), generator=self.random, device=self.device)
        anchors = max(1, self.plan.anchors * self.plan.rows // 512 // n)
        anchor = torch.multinomial(weight[index], anchors, True, generator=self.random)
        return text.rows(index), anchor

    def warm_up(self, texts: list[Text]) -> None:
        """Compiles everything that a run needs; falls back to plain functions where that fails."""
        try:
            self._warm_up(texts)
        except Exception as error:  # noqa: BLE001 - a compiler's failure of any kind
            if not self.compiled:
                raise
            self.run.failure = f"not compiled: {type(error).__name__}: {str(error)[:300]}"
            print(self.run.failure, file=sys.stderr, flush=True)
            self.clear()
            self.set_pieces(False)
            self._warm_up(texts)

    def _warm_up(self, texts: list[Text]) -> None:
        for text in {x.tokens.shape[1]: x for x in texts}.values():
            for select in (False, True):
                self.refresh(select)
                self.backward(*self.batch(text, anchor_weights(text, self.slots)), select)
                self.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def slots(self) -> int:
        return self.weights.shape.slots

    def train(self, texts: list[Text], until: float) -> None:
        """Trains on texts (the last is the long one) until `until` of the plan's seconds are spent.

        Called once a cohort. A failure ends it early and is recorded.
        """
        weights = [anchor_weights(x, self.slots) for x in texts]
        share = torch.tensor([float(w.sum()) for w in weights[:-1]])
        chosen = torch.Generator().manual_seed(self.run.steps)
        marks, start = deque(), time.perf_counter() - self.run.seconds
        last = 0.0
        while True:
            now = time.perf_counter() - start
            if now >= until * self.plan.seconds:
                break
            k = int(torch.multinomial(share, 1, generator=chosen))
            k = len(texts) - 1 if self.run.steps % self.plan.long == self.plan.long - 1 else k
            loss = self.step(*self.batch(texts[k], weights[k]), now / self.plan.seconds)
            wait_behind(marks, self.device)
            self.run.seconds = time.perf_counter() - start
            if self.run.steps <= 3 or self.run.seconds - last > 2:
                self.report(float(loss))
                last = self.run.seconds
        self.run.seconds = time.perf_counter() - start

    def report(self, loss: float) -> None:
        run = self.run
        if not math.isfinite(loss) or any(
            not bool(torch.isfinite(getattr(self.weights, n)).all()) for n in SELECTOR
        ):
            self.weights.load_state_dict(self.good)
            raise ArithmeticError(f"the loss is {loss} at step {run.steps}")
        self.good = {n: t.clone() for n, t in self.weights.state_dict().items()}
        run.curve.append(dict(step=run.steps, seconds=round(run.seconds, 1), loss=round(loss, 4)))
        if len(run.curve) % 5 < 2:
            print(
                f"{run.seconds:6.1f} s  step {run.steps:6d}  loss {loss:6.4f}  "
                f"{run.tokens / max(run.seconds, 1e-9) / 1e3:6.1f} k anchors/s",
                flush=True,
            )
