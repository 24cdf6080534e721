"""What rounds cost in rounds of plain decoding, on a machine whose speed changes all the time.

Engines take a round in turns, and beside each one goes a round of plain decoding by another engine:
a text's rounds take together so many times what the plain ones right before and after them take.
So what slows the machine for some milliseconds slows both. For a CPU, where a chunk of a stream is
a round; the first round of a text is left out, which has the prompt in it.
"""

import itertools
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kdtree import Engine, SamplingParams

K = TypeVar("K", bound=Hashable)
DRAWS = 2000  # of the bootstrap over texts


@dataclass(slots=True)
class Taken:
    """Of one text. seconds: of its rounds; beside: of as many plain ones"""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    beside: float = 0.0

    @property
    def plain(self) -> float:
        """As many plain rounds take as long."""
        return self.rounds * self.seconds / self.beside


def clock(engine: Engine, texts: list[str], params: SamplingParams) -> Iterator[float]:
    """Seconds of one plain round after the other, without end."""
    for text in itertools.cycle(texts):
        stream = engine.stream(text, params)
        next(stream)
        while (took := _round(stream))[1]:
            yield took[0]


def taken(
    engines: dict[K, Engine], plain: Iterator[float], text: str, params: SamplingParams
) -> dict[K, Taken]:
    """What each engine takes for a text, of which all make the same. plain: the clock"""
    streams = {name: engine.stream(text, params) for name, engine in engines.items()}
    found = {name: Taken() for name in engines}
    texts = {name: list(next(stream).token_ids) for name, stream in streams.items()}
    before = next(plain)
    while streams:
        for name, stream in list(streams.items()):
            seconds, chunk = _round(stream)
            after = next(plain)
            if chunk is None:
                del streams[name]
            else:
                texts[name] += chunk.token_ids
                found[name].tokens += len(chunk.token_ids)
                found[name].rounds += 1
                found[name].seconds += seconds
                found[name].beside += (before + after) / 2
            before = after
    first, *others = texts.values()
    assert all(other == first for other in others), "the engines' tokens differ"
    return found


def figures(found: list[Taken], chain: list[Taken]) -> dict:
    """Over texts: gains over plain decoding, and over the better of it and of the chain."""
    gain, better = _gain(_sums(found)), np.maximum(_gain(_sums(chain)), 1)
    pick = np.random.default_rng(0).integers(len(found), size=(DRAWS, len(found)))
    gains = _gain(_sums(found, pick))
    over = gains / np.maximum(_gain(_sums(chain, pick)), 1)
    tokens, rounds = (sum(getattr(each, name) for each in found) for name in ("tokens", "rounds"))
    return {
        "prompts": len(found),
        "tokens": tokens,
        "acceptance_length": tokens / rounds,
        "speedup": float(gain),
        "error": float(gains.std()),
        "over_better": float(gain / better),
        "over_better_error": float(over.std()),
    }


def _sums(found: list[Taken], pick: np.ndarray | slice = slice(None)) -> tuple[np.ndarray, ...]:
    return tuple(
        np.array([getattr(text, name) for text in found])[pick].sum(-1)
        for name in ("tokens", "plain")
    )


def _gain(sums: tuple[np.ndarray, ...]) -> np.ndarray:
    tokens, plain = sums
    return tokens / plain


def _round(stream: Iterator) -> tuple[float, object]:
    began = time.perf_counter()
    chunk = next(stream, None)
    return time.perf_counter() - began, chunk
