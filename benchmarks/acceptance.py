"""What speculation is worth on held-out text; writes docs/acceptance.md from what it measured.

    python benchmarks/acceptance.py                 # measures on this machine, then reports
    python benchmarks/acceptance.py --report        # reports what benchmarks/results/ holds

prompts.json holds 200 prompts a category. A row of kind "acceptance" is one drafter's figures over
a category, its tokens compared with plain decoding's; of kind "parts" the same, with a part of its
scores taken away; of kind "speed" of one sequence at a time; of kind "paired" the same in rounds of
plain decoding, see acceptance_paired.py; of kind "auto" the automatic budget's by tables of costs,
see acceptance_auto.py; of kinds "experts" and "int4", see acceptance_model.py.
Standard errors are over prompts (bootstrap).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import acceptance_auto
import acceptance_model
import acceptance_paired
import acceptance_report
import harness
import numpy as np

from kdtree import Engine, Result, SamplingParams
from kdtree.cli import machine
from kdtree.drafters import DflashConfig, DrafterConfig

HERE = Path(__file__).parent
TOKENS = 128  # decoded a prompt
DEPTHS = 7  # of the demo drafter
FEWER = 24  # prompts a category for a drafter with a part taken away
WARM_UP = 16
COLUMNS = (
    *("category", "temperature", "drafter", "tree", "budget", "tokens", "acceptance_length"),
    *("error", "distinct_4", "looping", "tokens_per_s", "speedup", "over_better"),
    "over_better_error",
    *("N", "distinct", "uniform", "margin", "positions", "flips", "bfloat16", "int4"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One way of drafting."""

    name: str
    drafter: str | DrafterConfig
    tree: str
    budget: int | str

    def engine(self, arguments, sequences: int) -> Engine:
        return Engine(
            arguments.model,
            drafter=self.drafter,
            budget=self.budget,
            remeasure=True,
            tree=self.tree,
            device=str(arguments.device),
            max_seq_len=512,
            max_batch=sequences,
        )


PLAIN = Run("none", "none", "best-first", 0)
CHAIN = Run("dflash", "dflash", "chain", DEPTHS)
TREES = [Run("dflash", "dflash", "best-first", nodes) for nodes in (7, 15, 31, 63)]
AUTO = Run("dflash", "dflash", "best-first", "auto")


def without(part: str, **scores: float) -> Run:
    """A tree of 7 whose fitted scores of some names are this number at every depth."""
    config = DflashConfig(scores={name: [value] * DEPTHS for name, value in scores.items()})
    return Run(f"dflash, without {part}", config, "best-first", 7)


RUNS = [Run("ngram", "ngram", "best-first", 7), CHAIN, *TREES]
PARTS = [
    Run("dflash, as shipped", DflashConfig(), "best-first", 7),
    without("coupling", b=0),
    without("edges", selector=0),
    without("coupling and edges", b=0, selector=0),
    without("any of its scores", a=1, b=0, c=0, selector=0),
]


def acceptance(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    """Many sequences at a time: tokens and rounds are those of one, times are not."""
    return compared("acceptance", RUNS, arguments, prompts)


def parts(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    """The same over fewer prompts, with a part of the drafter's scores taken away."""
    fewer = {category: texts[:FEWER] for category, texts in prompts.items()}
    return compared("parts", PARTS, arguments, fewer)


def compared(
    kind: str, runs: list[Run], arguments, prompts: dict[str, list[str]]
) -> Iterator[dict]:
    plain = {}
    for run in [PLAIN, *runs]:
        engine = run.engine(arguments, arguments.sequences)
        for category, texts in prompts.items():
            for t in arguments.temperature:
                results = engine.generate(texts, params(len(texts), t))
                reference = plain.setdefault((category, t), results)
                yield {"kind": kind} | facts(run, category, t) | figures(results, reference)


def speed(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    """One sequence at a time, drafters in turns, so that a drift of the clock meets all alike."""
    engines = {run: run.engine(arguments, 1) for run in (PLAIN, CHAIN, TREES[0], AUTO)}
    for category, texts in prompts.items():
        texts = texts[: arguments.timed]
        for t in arguments.temperature:
            results = {run: [] for run in engines}
            for engine in engines.values():
                engine.generate(texts[0], replace(params(1, t)[0], max_tokens=WARM_UP))
            for text, each in zip(texts, params(len(texts), t), strict=True):
                for run, engine in engines.items():
                    results[run].append(engine.generate(text, each))
            plain = results[PLAIN]
            for run, measured in results.items():
                row = {"kind": "speed"} | facts(run, category, t) | figures(measured, plain)
                if run is AUTO:
                    row["costs"] = acceptance_auto.measured(engines[run].drafter.costs)
                yield row | times(measured, plain)


def paired(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    """The same on a CPU, round by round beside plain decoding's."""
    if arguments.device.type != "cpu":
        return
    engines = {run: run.engine(arguments, 1) for run in (PLAIN, CHAIN, TREES[0], AUTO)}
    plain = PLAIN.engine(arguments, 1)
    for category, texts in prompts.items():
        texts = texts[: arguments.timed]
        for t in arguments.temperature:
            for engine in engines.values():
                engine.generate(texts[0], replace(params(1, t)[0], max_tokens=WARM_UP))
            clock = acceptance_paired.clock(plain, texts, params(1, t)[0])
            taken = [
                acceptance_paired.taken(engines, clock, text, each)
                for text, each in zip(texts, params(len(texts), t), strict=True)
            ]
            chain = [of[CHAIN] for of in taken]
            for run in engines:
                row = acceptance_paired.figures([of[run] for of in taken], chain)
                yield {"kind": "paired"} | facts(run, category, t) | row


def auto(arguments, prompts: dict[str, list[str]]) -> Iterator[dict]:
    """The automatic budget over all prompts by the costs of --costs, and by Kimi-K2.6's floors."""
    kinds, parts = [], []
    for by, costs in acceptance_auto.tables(arguments.costs).items():
        for category, texts in prompts.items():
            for t in arguments.temperature:
                of = arguments, by, costs, texts, params(len(texts), t)
                kinds.append((category, t))
                parts.append(acceptance_auto.Part(*of, threads=1 if arguments.jobs > 1 else 2))
    found = acceptance_auto.run(parts, arguments.jobs)
    for (category, t), (plain, results, told) in zip(kinds, found, strict=True):
        yield {"kind": "auto"} | facts(AUTO, category, t) | figures(results, plain) | told


def prompts_of(count: int) -> dict[str, list[str]]:
    """The first prompts of each category."""
    read = json.loads((HERE / "prompts.json").read_text())
    return {category: texts[:count] for category, texts in read.items()}


def params(count: int, temperature: float) -> list[SamplingParams]:
    base = SamplingParams(max_tokens=TOKENS, temperature=temperature, ignore_eos=True)
    return [replace(base, seed=seed) for seed in range(count)]


def facts(run: Run, category: str, temperature: float) -> dict:
    return {
        "category": category,
        "temperature": temperature,
        "drafter": run.name,
        "tree": run.tree,
        "budget": run.budget,
    }


def figures(results: list[Result], reference: list[Result]) -> dict:
    for result, plain in zip(results, reference, strict=True):
        assert result.token_ids == plain.token_ids, "other tokens than plain decoding"
    metrics = [result.metrics for result in results]
    tokens, rounds = (np.array([getattr(m, k) for m in metrics]) for k in ("tokens", "rounds"))
    distinct = [distinct_4(result.token_ids) for result in results]
    late = [distinct_4(result.token_ids[len(result.token_ids) // 2 :]) for result in results]
    offered, accepted = (
        [sum(n) for n in zip_longest(*(getattr(m, k) for m in metrics), fillvalue=0)]
        for k in ("offered", "accepted")
    )
    pick = np.random.default_rng(0).integers(len(tokens), size=(1000, len(tokens)))
    return {
        "prompts": len(results),
        "tokens": int(tokens.sum()),
        "rounds": int(rounds.sum()),
        "acceptance_length": float(tokens.sum() / rounds.sum()),
        "error": float((tokens[pick].sum(1) / rounds[pick].sum(1)).std()),
        "offered": offered,
        "accepted": accepted,
        "distinct_4": float(np.mean(distinct)),
        "looping": float(np.mean([each < 0.5 for each in late])),
        "not_looping": split(tokens, rounds, np.array([each >= 0.5 for each in late])),
    }


def split(tokens: np.ndarray, rounds: np.ndarray, kept: np.ndarray) -> float | None:
    """Acceptance length over some of the prompts alone."""
    return float(tokens[kept].sum() / rounds[kept].sum()) if kept.any() else None


def times(results: list[Result], plain: list[Result]) -> dict:
    seconds = sum(r.metrics.decode_s for r in results)
    rounds = sum(r.metrics.rounds for r in results)
    phases = {}
    for r in results:
        for name, took in r.metrics.phases.items():
            phases[name] = phases.get(name, 0.0) + 1e3 * took / rounds
    return {
        "tokens_per_s": sum(r.metrics.tokens for r in results) / seconds,
        "speedup": sum(r.metrics.decode_s for r in plain) / seconds,
        "ms_per_round": 1e3 * seconds / rounds,
        "phases_ms": phases,
    }


def distinct_4(ids: list[int]) -> float:
    """Share of a text's 4-grams that are distinct."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / max(1, len(grams))


KINDS: dict[str, Callable[..., Iterator[dict]]] = {
    "acceptance": acceptance,
    "parts": parts,
    "speed": speed,
    "paired": paired,
    "auto": auto,
    "model": acceptance_model.rows,
}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a model directory instead of the demo model")
    parser.add_argument("--prompts", type=int, default=200, help="a category")
    parser.add_argument("--timed", type=int, default=8, help="of them, one at a time")
    parser.add_argument("--sequences", type=int, default=32, help="at a time, where not timed")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--costs",
        type=Path,
        help="results with the costs for kind auto",
        default=harness.RESULTS / "acceptance_cuda.json",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes for kind auto")
    parser.add_argument("--only", nargs="+", default=list(KINDS))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if not arguments.report:
        measure(arguments)
    if arguments.out == harness.RESULTS:
        acceptance_report.write(HERE.parent / "docs", harness.RESULTS)


def measure(arguments) -> None:
    prompts = prompts_of(arguments.prompts)
    peaks = harness.peaks(arguments.device)
    header = harness.header(arguments.device, peaks, arguments.commit)
    name, rows = f"acceptance_{arguments.device.type}", []
    arguments.out.mkdir(parents=True, exist_ok=True)
    for kind in arguments.only:
        for row in KINDS[kind](arguments, prompts):
            rows.append(row)  # what was measured is kept, whatever ends the run
            machine.write_results(arguments.out / f"{name}.json", rows, header)
    harness.write(name, rows, header, arguments.out, COLUMNS)


if __name__ == "__main__":
    main()
