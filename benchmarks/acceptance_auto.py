"""The automatic budget's choice over many prompts, by tables of costs: rows for acceptance.py.

With its costs given, what it chooses and emits is the same on every machine and does not depend on
the clock, so many texts can run side by side, and a machine that is not at hand can be studied.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import kimi
import torch

from kdtree import Costs, Engine, Result, SamplingParams
from kdtree.costs import SIZES


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of text by one table. by: whose costs; threads: of torch"""

    arguments: Namespace
    by: str
    costs: Costs
    texts: list[str]
    params: list[SamplingParams]
    threads: int


def tables(path: Path) -> dict[str, Costs]:
    """The costs that a speed row of these results was measured with, and Kimi's floors."""
    found = json.loads(path.read_text())
    measured = next(row["costs"] for row in found["rows"] if row.get("costs"))
    rounds = {int(size): seconds for size, seconds in measured["rounds"].items()}
    return {found["card"]: Costs(rounds, measured["draft"]), kimi.NAME: kimi.costs(list(SIZES))}


def measured(costs: Costs) -> dict:
    """As a row holds it."""
    return {"rounds": {str(size): s for size, s in costs.rounds.items()}, "draft": costs.draft}


def run(parts: list[Part], jobs: int) -> Iterator[tuple[list[Result], list[Result], dict]]:
    """Plain decoding's results, the automatic budget's, and its facts, in order."""
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_results, parts)


def _results(part: Part) -> tuple[list[Result], list[Result], dict]:
    torch.set_num_threads(part.threads)
    where = {"device": str(part.arguments.device), "max_seq_len": 512}
    plain = Engine(part.arguments.model, max_batch=part.arguments.sequences, **where)
    reference = plain.generate(part.texts, part.params)
    engine = Engine(part.arguments.model, drafter="dflash", budget=part.costs, **where)
    results = engine.generate(part.texts, part.params)
    chosen = dict(sorted(engine.drafter.chosen.items()))
    drafted = engine.drafter.drafts
    seconds = sum(n * part.costs.rounds[size] for size, n in chosen.items())
    seconds += drafted * part.costs.draft
    tokens = sum(result.metrics.tokens for result in results)
    facts = {
        "by": part.by,
        "chosen": {str(size): n for size, n in chosen.items()},
        "drafts": drafted,
        "tokens_per_s": tokens / seconds,
        "speedup": tokens * part.costs.rounds[1] / seconds,
    }
    return reference, results, facts
