"""Continues a prompt and writes the text as it comes.

The prompt is the argument or else stdin, as it is; with --chat it is a user's message. stdout
holds nothing but text; statistics, trees and log-probabilities go to stderr.
"""

import argparse
import sys
import time
from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtree import Completion, Engine, SamplingParams
from kdtree.cli import draw, options, plot
from kdtree.text import Message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="stdin if left out")
    parser.add_argument(
        "--chat", action="store_true", help="the prompt is a message: use the model's chat template"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the conversation's first message (--chat)"
    )
    parser.add_argument(
        "--drafter", metavar="NAME", help="none (default), ngram, dflash (default for a given one)"
    )
    options.add_engine(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=options.whole, metavar="N", help="default: to the context's end"
    )
    sampling.add_argument(
        "--temperature", type=options.real, default=0.0, metavar="T", help="0: greedy"
    )
    sampling.add_argument("--top-k", type=options.whole, default=0, metavar="K", help="0: all")
    sampling.add_argument("--top-p", type=options.real, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=options.real, default=0.0, metavar="P")
    sampling.add_argument("--seed", type=options.whole, default=0)
    sampling.add_argument("--n", type=options.whole, default=1, help="completions")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    sampling.add_argument(
        "--stop-token-ids", type=options.whole, action="append", default=[], metavar="ID"
    )
    sampling.add_argument("--ignore-eos", action="store_true")
    sampling.add_argument("--min-tokens", type=options.whole, default=0, metavar="N")
    sampling.add_argument(
        "--logprobs", type=options.whole, metavar="K", help="list the K best of each token"
    )
    parser.add_argument("--stats", action="store_true", help="statistics, on stderr")
    options.add_trace(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        n=arguments.n,
        stop=tuple(arguments.stop),
        stop_token_ids=tuple(arguments.stop_token_ids),
        ignore_eos=arguments.ignore_eos,
        min_tokens=arguments.min_tokens,
        logprobs=arguments.logprobs,
    )
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system is a message of a conversation: it wants --chat")
    if arguments.drafter is None:
        arguments.drafter = "none" if arguments.drafter_model is None else "dflash"
    if options.is_oracle(arguments.drafter):
        raise ValueError("the oracle is told the text, which only demo and bench know beforehand")
    options.check(arguments, [arguments.drafter])
    plot.check(arguments.trace_png)
    prompt = _read() if arguments.prompt is None else arguments.prompt
    prompt = _messages(prompt, arguments.system) if arguments.chat else prompt
    with draw.progress(1) as bar:
        bar.begin("loading the model")
        drafter = options.drafter(arguments.drafter, [], arguments.drafter_model)
        engine = options.engine(arguments, drafter, bar.load)
    if params.n > 1 or params.logprobs is not None or _is_traced(arguments):
        _whole(engine, prompt, params, arguments)
    else:
        _stream(engine, prompt, params, arguments.stats)
    return 0


def _read() -> str:
    if sys.stdin.isatty():
        print("kdtree: type the prompt, then end of file (Ctrl-D)", file=sys.stderr)
    return sys.stdin.read()


def _messages(prompt: str, system: str | None) -> list[Message]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def _stream(
    engine: Engine, prompt: str | list[Message], params: SamplingParams, stats: bool
) -> None:
    start = time.perf_counter()
    first = last = start
    sizes = []  # tokens of each round
    stream = engine.stream if isinstance(prompt, str) else engine.stream_chat
    for chunk in stream(prompt, params):
        draw.write(chunk.text)
        last = time.perf_counter()
        first = last if not sizes else first
        sizes.append(len(chunk.token_ids))
    draw.write("\n")
    if stats and sizes:
        rate = sum(sizes[1:]) / (last - first) if last > first else 0.0
        _print_stats(sum(sizes), len(sizes), first - start, rate, Counter(sizes))


def _whole(engine: Engine, prompt: str | list[Message], params: SamplingParams, arguments) -> None:
    """What a stream does not carry: several completions, log-probabilities, trees."""
    with draw.progress(1) as bar:
        bar.begin("generating")
        complete = engine.generate if isinstance(prompt, str) else engine.chat
        result = complete(prompt, params, trace=_is_traced(arguments))
    console = Console(stderr=True, highlight=False)
    for completion in result.completions:
        if params.n > 1:
            draw.write(f"--- completion {completion.index + 1} of {params.n}\n")
        draw.write(completion.text + "\n")
        if arguments.trace:
            console.print(*draw.rounds(completion.trace, engine.tokenizer), sep="\n")
        if arguments.trace_png is not None:
            prefix = f"completion-{completion.index + 1}-" if params.n > 1 else ""
            plot.rounds(completion.trace, engine.tokenizer, arguments.trace_png, prefix)
        if completion.logprobs is not None:
            console.print(_logprobs(completion, engine.tokenizer))
        if arguments.stats:
            m = completion.metrics
            counts = dict(enumerate(m.histogram))
            _print_stats(m.tokens, m.rounds, m.ttft_s, m.tokens_per_s, counts)


def _is_traced(arguments: argparse.Namespace) -> bool:
    return arguments.trace or arguments.trace_png is not None


def _print_stats(tokens: int, rounds: int, first_s: float, rate: float, sizes: dict) -> None:
    """sizes: how many rounds emitted how many tokens"""
    spread = ", ".join(f"{size}: {sizes[size]}" for size in sorted(sizes) if sizes[size])
    print(
        f"{tokens} tokens in {rounds} rounds, acceptance length {tokens / max(rounds, 1):.2f}; "
        f"first after {first_s:.3f} s, then {rate:.1f} tokens/s\n"
        f"rounds by tokens emitted: {spread}",
        file=sys.stderr,
    )


def _logprobs(completion: Completion, tokenizer) -> Table:
    table = Table("token", "log-probability", "best")
    for id, best in zip(completion.token_ids, completion.logprobs, strict=True):
        ranked = sorted(best.items(), key=lambda item: -item[1])
        names = "  ".join(f"{draw.token(tokenizer, i)} {value:.3f}" for i, value in ranked)
        own = f"{best[id]:.3f}" if id in best else ""
        table.add_row(*map(Text, (draw.token(tokenizer, id), own, names)))
    return table
