"""The demo model's decoding: plain, by prompt look-up, by its trained drafter, by oracles.

An oracle drafts the true tokens with the given probability: an upper bound for a drafter that is as
often right, not a drafter. A row of kind "decode" is one drafter's figures over all prompts, with
the speed-up over plain decoding beside its acceptance length. On CUDA rounds are replayed from
graphs; those of EAGER are also launched op by op, in rows whose "graphs" is false, and their speed-
up is over plain decoding launched so. A row of kind "forward" is the time of a forward of N nodes,
and over that of one; its drafts are wrong. benchmarks/tables.py puts both kinds into README.md.
"""

from pathlib import Path

import harness

from kdtree import Engine, SamplingParams
from kdtree.cli import bench, options

NODES = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (
    *("drafter", "tree", "budget", "graphs", "temperature"),
    *("tokens_per_s", "acceptance_length", "speedup", "ms_per_round", "phases_ms"),
    *("N", "ms", "over_one"),
)
RUNS: list[tuple[str, str, int | str]] = [  # drafter, tree, budget
    ("none", "chain", "auto"),
    ("ngram", "chain", 7),
    ("dflash", "chain", 7),
    ("dflash", "best-first", 7),
    ("dflash", "best-first", 15),
    ("dflash", "best-first", 31),
    ("dflash", "best-first", "auto"),
    ("oracle:0.8", "best-first", 7),
    ("oracle:1", "chain", 7),
]
EAGER = [("none", "chain", "auto"), ("dflash", "chain", 7), ("dflash", "best-first", 7)]


def decode_rows(arguments, temperature: float, graphs: bool) -> list[dict]:
    """Of RUNS, or of those that are launched op by op beside them."""
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=temperature, seed=1, ignore_eos=True
    )
    rows, reference = [], None
    cuda = arguments.device.type == "cuda"
    for drafter, tree, budget in RUNS if graphs or not cuda else EAGER:
        engine = make(arguments, drafter, tree, budget, reference, graphs)
        results = bench.decode(engine, bench.PROMPTS, params, arguments.repeat)
        reference = reference or results
        facts = {"kind": "decode", "drafter": drafter, "tree": tree, "budget": budget}
        figures = bench.summary(results, reference)
        assert figures["identical"], f"{drafter}, {tree}: other tokens than plain decoding"
        facts |= {"graphs": graphs and cuda, "temperature": temperature}
        rows.append(facts | figures)
    return rows


def forward_rows(arguments) -> list[dict]:
    params = SamplingParams(max_tokens=min(32, arguments.max_tokens), ignore_eos=True)
    rows, reference, first = [], None, None
    for N in NODES:
        drafter, budget = ("oracle:0", N - 1) if N > 1 else ("none", "auto")
        engine = make(arguments, drafter, "best-first", budget, reference)
        results = bench.decode(engine, bench.PROMPTS[:1], params, arguments.repeat)
        reference = reference or results
        ms = bench.summary(results, reference)["phases_ms"]["forward"]
        first = first or ms
        rows.append({"kind": "forward", "N": N, "ms": ms, "over_one": ms / first if first else 0.0})
    return rows


def make(
    arguments, drafter: str, tree: str, budget: int | str, reference, graphs: bool = True
) -> Engine:
    truth = [result.prompt_token_ids + result.token_ids for result in reference or ()]
    return Engine(
        arguments.model,
        drafter=options.drafter(drafter, truth),
        budget=budget,
        remeasure=True,
        tree=tree,
        device=str(arguments.device),
        cuda_graphs=graphs,
    )


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a model directory instead of the demo model")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    arguments = parser.parse_args()
    peaks = harness.peaks(arguments.device)
    launched = (True, False) if arguments.device.type == "cuda" else (True,)
    cases = [(t, graphs) for t in arguments.temperature for graphs in launched]
    decode = [row for case in cases for row in decode_rows(arguments, *case)]
    forward = forward_rows(arguments)
    facts = harness.header(arguments.device, peaks, arguments.commit)
    harness.write(
        f"engine_{arguments.device.type}", decode + forward, facts, arguments.out, COLUMNS
    )


if __name__ == "__main__":
    main()
