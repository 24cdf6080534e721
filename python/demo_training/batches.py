"""What the demo model sees in training, and what it is told about it.

Some rows of a late batch are windows whose end repeats itself: there the third and later repeats
are taught to be half as likely as the one before, so that greedy output leaves a loop (after Xu
et al. 2022, "Learning to Break the Loop").
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from demo_training.plan import LONG, Plan


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
