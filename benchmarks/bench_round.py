"""A round outside layers and head, at the sizes of Kimi-K2.6: the engine's own round, from a graph,
around a model that does nothing.

Draft by look-up, tree, places, the draws over 163,840 ids, the walk, compaction of 61 layers,
commit and the record that the host reads. Every round is the same one: it finds matches, of which
the first token is right. A row has the microseconds of a round and, by the device's clock, of its
phases; its floor is that of the logits' bytes and the text's.
"""

import statistics
from collections.abc import Callable
from typing import TypeVar

import harness
import torch

from kdtree import Engine
from kdtree.cache import KvCache
from kdtree.config import load
from kdtree.drafters.base import Setup
from kdtree.drafters.ngram import NgramConfig
from kdtree.record import Asked, Round
from kdtree.sampling import SamplingParams
from kdtree.state import State

CONFIG = harness.RESULTS.parents[1] / "tests" / "data" / "kimi-k2.6"
T = TypeVar("T")
ROUNDS, REPLAYS = 20, 15  # a graph's rounds; its replays, of which the median counts
REPEATS = 50  # tokens between those that are alike: what there is to look up


class Layerless:
    """What Engine._round wants of an engine whose model does nothing, and `reset`, which takes a
    round back. known: tokens of the text, of room for so many"""

    def __init__(self, known: int, room: int, nodes: int, device: torch.device):
        torch.manual_seed(0)
        config, self.known, self.device, self.model = load(CONFIG), known, device, self
        where = {"device": device, "dtype": torch.bfloat16}
        self.drafter = NgramConfig().create(
            Setup(nodes - 1, False, False, config, CONFIG, 1, room, **where)
        )
        self.cache = KvCache.of(config, 1, room, **where)
        self.state = State(1, room, device)
        text = torch.randint(config.vocab, (known,))
        text[::REPEATS] = text[-1]
        self.state.start(0, text.tolist(), SamplingParams(max_tokens=None), [])
        self.right = text[(known - 2) // REPEATS * REPEATS + 1].item()
        self.said = torch.randn(1, nodes, config.vocab, device=device)
        self.said[..., self.right] = 100
        self.tokens = [self.right] * min(nodes, 2)
        self.reset()

    def __call__(self, step, cache, taps):
        return None, None

    def logits(self, hidden):
        return self.said

    def round(self) -> Round:
        return Engine._round(self, Asked(), None)

    def reset(self) -> None:
        self.state.length.fill_(self.known)
        self.cache.context.fill_(self.known - 1)

    def check(self, made: Round) -> dict[str, float]:
        """That a round did what it should; its phases."""
        landed = made.read(made.packed.cpu())
        assert landed.emitted[0].token_ids == self.tokens, landed.emitted
        return landed.phases


def measure(
    known: int, room: int, nodes: int, device: torch.device, measured: harness.Peaks
) -> dict:
    engine, phases = Layerless(known, room, nodes, device), []

    def round():
        made = engine.round()
        engine.reset()
        return made

    us = replayed(round, lambda made: phases.extend(map(engine.check, made)))
    us -= replayed(engine.reset)
    by_phase = {name: 1e6 * statistics.median(p[name] for p in phases) for name in phases[0]}
    floor = harness.floor(engine.said.nbytes + 8 * known, 0, measured)
    size = {"known": known, "room": room, "N": nodes}
    return {"kind": "round"} | size | {"us": us, "floor_us": floor, "phases_us": by_phase}


def replayed(work: Callable[[], T], then: Callable[[list[T]], None] = lambda made: None) -> float:
    """Microseconds of work in a graph; then: called with what a graph of it made."""
    work()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        made = [work() for _ in range(ROUNDS)]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / ROUNDS)
        then(made)
    return statistics.median(times)


def main() -> None:
    arguments = harness.arguments(__doc__).parse_args()
    device = arguments.device
    if device.type != "cuda":
        raise SystemExit(f"a round's launches are timed in CUDA graphs, the device is {device}")
    peaks = harness.peaks(device)
    sizes = (4000, 8192), (250_000, 262_144)
    rows = [measure(*size, nodes, device, peaks) for size in sizes for nodes in (1, 16)]
    facts = harness.header(device, peaks, arguments.commit)
    columns = ("known", "room", "N", "us", "floor_us", "phases_us", "of floor")
    harness.write("round_cuda", rows, facts, arguments.out, columns)


if __name__ == "__main__":
    main()
