"""A round outside layers and head, at the sizes of Kimi-K2.6: the engine's own round, from a graph,
around a model that does nothing.

Draft by look-up, tree, places, the draws over 163,840 ids, the walk, compaction of 61 layers,
commit and the record that the host reads. Every round is the same one: it finds matches, of which
the first token is right. A row has the microseconds of a round and, by the device's clock, of its
phases.
"""

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

import harness
import torch

from kdtree import Engine
from kdtree.cache import KvCache
from kdtree.config import load
from kdtree.drafters.base import Setup
from kdtree.drafters.ngram import NgramConfig
from kdtree.record import Asked
from kdtree.sampling import SamplingParams
from kdtree.state import State

CONFIG = harness.RESULTS.parents[1] / "tests" / "data" / "kimi-k2.6"
T = TypeVar("T")
ROUNDS, REPLAYS = 20, 15  # a graph's rounds; its replays, of which the median counts
REPEATS = 50  # tokens between those that are alike: what there is to look up


def rounds_of(known: int, room: int, nodes: int, device: torch.device) -> SimpleNamespace:
    """What Engine._round wants, and reset(), which takes a round back. known: tokens of the text,
    of room for so many"""
    torch.manual_seed(0)
    config = load(CONFIG)
    setup = Setup(
        budget=nodes - 1,
        chain=False,
        chain_seed=False,
        target=config,
        directory=CONFIG,
        sequences=1,
        max_seq_len=room,
        device=device,
        dtype=torch.bfloat16,
    )
    state = State(1, room, device)
    text = torch.randint(config.vocab, (known,))
    text[::REPEATS] = text[-1]
    state.start(0, text.tolist(), SamplingParams(max_tokens=None), [])
    cache = KvCache.of(config, 1, room, device=device, dtype=torch.bfloat16)
    logits = torch.randn(1, nodes, config.vocab, device=device)
    logits[..., text[(known - 2) // REPEATS * REPEATS + 1]] = 100

    class Model:
        """Of no layers."""

        def __call__(self, step, cache, taps):
            return None, None

        def logits(self, hidden):
            return logits

    def reset():
        state.length.fill_(known)
        cache.context.fill_(known - 1)

    reset()
    drafter = NgramConfig().create(setup)
    return SimpleNamespace(
        device=device, state=state, cache=cache, drafter=drafter, model=Model(), reset=reset
    )


def measure(known: int, room: int, nodes: int, device: torch.device) -> dict:
    engine, phases = rounds_of(known, room, nodes, device), []

    def round():
        made = Engine._round(engine, Asked(), None)
        engine.reset()
        return made

    def then(made):
        phases.extend(each.read(each.packed.cpu()).phases for each in made)

    us = replayed(round, then) - replayed(engine.reset)
    by_phase = {name: 1e6 * statistics.median(p[name] for p in phases) for name in phases[0]}
    size = {"known": known, "room": room, "N": nodes}
    return {"kind": "round"} | size | {"round_us": us, "phases_us": by_phase}


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
    facts = harness.header(device, harness.peaks(device), arguments.commit)
    sizes = (4000, 8192), (250_000, 262_144)
    rows = [measure(*size, nodes, device) for size in sizes for nodes in (1, 16)]
    columns = ("known", "room", "N", "round_us", "phases_us")
    harness.write("round_cuda", rows, facts, arguments.out, columns)


if __name__ == "__main__":
    main()
