"""Text that the target writes itself, with the features that a drafter reads, and its anchors.

A part is many sequences of one length: a prompt from a token set, then what the target draws with
the sampler's own noise. Drafters are not known here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from demo_training.drafter_noise import draw
from demo_training.drafter_target import Target

LOOP = 16  # a run of so many tokens that repeats what came one period before is a loop
PERIOD = 64  # the longest period that is looked for


@dataclass(frozen=True, slots=True)
class Part:
    """How to write a part: `temperatures` go round."""

    sequences: int
    prompt: int
    length: int
    temperatures: tuple[float, ...]

    @staticmethod
    def of(small: bool) -> tuple["Part", ...]:
        """Warm text, greedy text (short: it soon loops), and text far from the beginning."""
        if small:
            return Part(8, 16, 40, (0.7, 1.0)), Part(4, 28, 40, (0.0,)), Part(2, 64, 80, (1.0,))
        return (
            Part(12288, 64, 512, (0.7, 1.0)),
            Part(4096, 384, 512, (0.0,)),
            Part(1024, 1792, 2048, (0.0, 0.7, 1.0, 1.0)),
        )


@dataclass(slots=True)
class Text:
    """n sequences of T tokens: tokens [n, T]; taps, last [n, T, .]; the rest [n].

    Of the last token neither taps nor last are known. prompt: tokens before the target's own
    """

    tokens: Tensor
    taps: Tensor
    last: Tensor
    temperature: Tensor
    seed: Tensor
    prompt: int

    def rows(self, index: Tensor | slice) -> "Text":
        fields = (self.tokens, self.taps, self.last, self.temperature, self.seed)
        return Text(*(x[index] for x in fields), self.prompt)

    def __len__(self) -> int:
        return len(self.tokens)


@torch.no_grad()
def write(
    target: Target, prompts: Tensor, length: int, temperature: Tensor, seed: Tensor, draw=draw
) -> Text:
    """Continues prompts [n, P] to `length` tokens; temperature, seed [n]; draw may be compiled."""
    (n, p), s = prompts.shape, target.shape
    width, device = len(target.taps) * s.hidden, target.device
    cache, t = target.cache(n, length), length
    text = Text(
        torch.zeros(n, t, dtype=torch.int64, device=device),
        torch.zeros(n, t, width, dtype=target.low, device=device),
        torch.zeros(n, t, s.hidden, dtype=target.low, device=device),
        temperature,
        seed,
        p,
    )
    seen = target.prefill(prompts, cache)
    text.tokens[:, :p], text.taps[:, :p], text.last[:, :p] = prompts, seen.taps, seen.last
    last = seen.last[:, -1]
    del seen
    for position in range(p, length):
        at = torch.full_like(seed, position)
        token = draw(target.logits(last), temperature, seed, at)
        text.tokens[:, position] = token
        if position + 1 < length:
            seen = target.decode(token, position, cache)
            text.taps[:, position], text.last[:, position] = seen.taps, seen.last
            last = seen.last
    return text


def windows(data: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, length] windows that begin anywhere in the set."""
    start = torch.randint(len(data) - length, (count,), generator=generator).to(data.device)
    return data[start[:, None] + torch.arange(length, device=data.device)].long()


def spread(data: Tensor, count: int, length: int) -> Tensor:
    """[count, length] windows spread evenly over the set."""
    start = torch.linspace(0, len(data) - length - 1, count, dtype=torch.float64).long()
    return data[start.to(data.device)[:, None] + torch.arange(length, device=data.device)].long()


def write_part(
    target: Target, part: Part, data: Tensor, generator: torch.Generator, draw=draw
) -> Text:
    n, device = part.sequences, target.device
    prompts = windows(data, n, part.prompt, generator)
    kinds = torch.tensor(part.temperatures, device=device)
    temperature = kinds[torch.arange(n, device=device) % len(kinds)]
    seed = torch.randint(2**62, (n,), generator=generator).to(device)
    return write(target, prompts, part.length, temperature, seed, draw)


def looping(tokens: Tensor) -> Tensor:
    """Which tokens [n, T] end a run of LOOP that repeats what came one period before; bool."""
    n, t = tokens.shape
    found = torch.zeros(n, t, dtype=torch.bool, device=tokens.device)
    for period in range(1, min(PERIOD, t - LOOP) + 1):
        same = (tokens[:, period:] == tokens[:, :-period]).int().cumsum(1)
        run = same[:, LOOP - 1 :].clone()
        run[:, 1:] -= same[:, :-LOOP]
        found[:, period + LOOP - 1 :] |= run == LOOP
    return found


def anchor_weights(text: Text, slots: int) -> Tensor:
    """How often a block begins at each token, [n, T] float32, by how much it has to teach.

    None where it would run over the end; seldom in the prompt, and in loops.
    """
    t = text.tokens.shape[1]
    place = torch.arange(t, device=text.tokens.device)
    weight = torch.where(place + 1 >= text.prompt, 1.0, 0.1)
    weight = weight * (place > 0) * (place + slots < t)
    looped = looping(text.tokens)
    ahead = (place + slots // 2).clamp(max=t - 1)
    return weight * torch.where(looped[:, ahead], 0.15, 1.0)
