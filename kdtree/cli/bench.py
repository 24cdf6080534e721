"""Measures prefill, decoding and drafting of a model on this machine.

Each drafter decodes the same prompts; its tokens are compared with those of plain decoding (exit
code 1 if they differ). A speed-up stands beside its acceptance length. With --shape, a slice of a
large model with random weights: the time of its layers beside their floors.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kdtree import Engine, Result, SamplingParams
from kdtree.checks import whole
from kdtree.cli import draw, machine, options, slices
from kdtree.cli.demo import ORACLE, PROMPT, WARM_UP

PROMPTS = [
    PROMPT,
    "The following example shows how to open a file, read it line by line, and count the words:\n",
    "class Cache:\n    def __init__(self, size):\n        self.size = size\n",
    "To install the package, run the following command in a terminal. If you want to",
]
MOST_RUNS = 1000
PHASES = ("draft", "forward", "verify", "commit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine(parser)
    parser.add_argument(
        "--drafter",
        action="append",
        metavar="NAME",
        help="repeatable; default ngram, and dflash where there is one; oracle[:ACCURACY]",
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--max-tokens", type=options.whole, default=128, metavar="N")
    parser.add_argument("--temperature", type=options.real, default=0.0, metavar="T")
    parser.add_argument("--seed", type=options.whole, default=0)
    parser.add_argument(
        "--repeat", type=options.whole, default=3, metavar="R", help="runs; the median counts"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    slices.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.shape is not None:
        return slices.run(arguments)
    slices.unasked(arguments)
    if arguments.json is not None:
        arguments.json.touch()  # so that a file that cannot be written fails now, not at the end
    prompts = arguments.prompt or PROMPTS
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        ignore_eos=True,
    )
    drafters = ["none", *(arguments.drafter or ["ngram", *options.trained(arguments)])]
    options.check(arguments, drafters)
    rows, reference = [], None
    with draw.progress(len(drafters) + 1) as bar:
        for name in drafters:
            bar.begin(name)
            if name == "none":
                engine = options.plain(arguments, bar.load)
            else:
                truth = [r.prompt_token_ids + r.token_ids for r in reference]
                drafter = options.drafter(name, truth, arguments.drafter_model)
                engine = options.engine(arguments, drafter, bar.load)
            results = decode(engine, prompts, params, arguments.repeat)
            reference = reference or results
            facts = {"drafter": name, "tree": None, "budget": None}
            if name != "none":
                facts |= {"tree": arguments.tree, "budget": arguments.budget}
            rows.append(facts | summary(results, reference) | {"temperature": params.temperature})
            device = engine.device
            del engine
        bar.begin("the machine")
        facts = machine.header(device, machine.peaks(device))
    if arguments.json is not None:
        machine.write_results(arguments.json, rows, facts)
    _show(rows, facts)
    if all(row["identical"] for row in rows):
        return 0
    print("kdtree: THE TOKENS DIFFER from plain decoding. This is a bug.", file=sys.stderr)
    return 1


def decode(engine: Engine, prompts: list[str], params: SamplingParams, repeat: int) -> list[Result]:
    """A Result per prompt, in one call: of `repeat` calls the one of median decoding time."""
    whole("repeat", repeat, 1, MOST_RUNS)
    few = WARM_UP if params.max_tokens is None else min(WARM_UP, params.max_tokens)
    engine.generate(prompts[0], replace(params, max_tokens=few))
    runs = [engine.generate(prompts, params) for _ in range(repeat)]
    runs.sort(key=lambda run: sum(result.metrics.decode_s for result in run))
    return runs[(repeat - 1) // 2]


def summary(results: list[Result], reference: list[Result]) -> dict:
    """Figures over a call's prompts, beside those of plain decoding of the same prompts."""
    metrics = [result.metrics for result in results]
    tokens, rounds = sum(m.tokens for m in metrics), sum(m.rounds for m in metrics)
    decode_s = sum(m.decode_s for m in metrics)
    prefill_s = sum(m.prefill_s for m in metrics)
    phases = metrics[-1].phases  # they run on through a call
    offered, accepted = _sums(m.offered for m in metrics), _sums(m.accepted for m in metrics)
    base_s = sum(r.metrics.decode_s for r in reference)
    return {
        "prompts": len(metrics),
        "prompt_tokens": sum(m.prompt_tokens for m in metrics),
        "tokens": tokens,
        "rounds": rounds,
        "ttft_ms": 1e3 * statistics.median(m.ttft_s for m in metrics),
        "prefill_tokens_per_s": _ratio(sum(m.prompt_tokens for m in metrics), prefill_s),
        "tokens_per_s": _ratio(tokens, decode_s),
        "acceptance_length": _ratio(tokens, rounds),
        "speedup": _ratio(base_s, decode_s),
        "ms_per_round": 1e3 * _ratio(decode_s, rounds),
        "phases_ms": {name: 1e3 * _ratio(phases.get(name, 0.0), rounds) for name in PHASES},
        "histogram": _sums(m.histogram for m in metrics),
        "acceptance_by_depth": [_ratio(a, n) for a, n in zip(accepted, offered, strict=True)],
        "identical": [r.token_ids for r in results] == [r.token_ids for r in reference],
    }


def _sums(counts: Iterable[list[int]]) -> list[int]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _show(rows: list[dict], facts: dict) -> None:
    console = Console(highlight=False)
    console.print(
        f"{facts['card']}, torch {facts['torch']}; {rows[0]['prompts']} prompts of "
        f"{rows[0]['prompt_tokens']} tokens, {rows[0]['tokens']} tokens decoded"
    )
    table = Table(
        "drafter", "prefill tok/s", "tok/s", "tokens a round", "speed-up", "ms a round", *PHASES
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row["drafter"],
            f"{row['prefill_tokens_per_s']:.0f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['ms_per_round']:.2f}",
            *(f"{row['phases_ms'][phase]:.2f}" for phase in PHASES),
        )
    console.print(table)
    for row in rows[1:]:
        counts = ", ".join(f"{size}: {n}" for size, n in enumerate(row["histogram"]) if n)
        console.print(f"{row['drafter']}: rounds by tokens emitted: {counts}")
        if row["acceptance_by_depth"]:
            console.print(f"{row['drafter']}: {draw.by_depth(row['acceptance_by_depth'])}")
        if options.is_oracle(row["drafter"]):
            console.print(ORACLE, style="bold yellow")
