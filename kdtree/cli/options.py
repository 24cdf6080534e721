"""Options that several commands share, and the engines and drafters that they name."""

import argparse
from pathlib import Path

from kdtree import DflashConfig, Engine, OracleConfig
from kdtree import options as limits
from kdtree.checks import shown
from kdtree.drafters import DrafterConfig
from kdtree.drafters.dflash import BESIDE
from kdtree.tree import MAX_NODES
from kdtree.weights import Progress


def add_engine(parser: argparse.ArgumentParser, budget: int | str | None = "auto") -> None:
    """budget: the default; None where the command says in its help what it will be"""
    parser.add_argument("--model", metavar="DIR", help="model directory (default: the demo model)")
    parser.add_argument(
        "--drafter-model",
        type=Path,
        metavar="DIR",
        help="dflash drafter (default: beside the model)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, or fp8 for e4m3 latents")
    parser.add_argument("--quantize", help="int4: quantise routed experts while loading")
    parser.add_argument(
        "--budget", type=_budget, default=budget, metavar="N", help="draft nodes a round, or auto"
    )
    parser.add_argument("--tree", default="best-first", help="best-first or chain")
    parser.add_argument(
        "--chain-seed", action="store_true", help="put the best chain in the tree first"
    )
    parser.add_argument(
        "--remeasure", action="store_true", help="for --budget auto: time rounds of every size anew"
    )
    parser.add_argument("--max-seq-len", type=whole, metavar="N", help="tokens of context")


def add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", action="store_true", help="show every round's tree")
    parser.add_argument(
        "--trace-png", type=Path, metavar="DIR", help="draw them, DIR/round-001.png (matplotlib)"
    )


def engine(
    arguments: argparse.Namespace, drafter: str | DrafterConfig, progress: Progress | None = None
) -> Engine:
    return Engine(
        arguments.model,
        drafter=drafter,
        budget=arguments.budget,
        tree=arguments.tree,
        chain_seed=arguments.chain_seed,
        remeasure=arguments.remeasure,
        progress=progress,
        **_model(arguments),
    )


def plain(arguments: argparse.Namespace, progress: Progress | None = None) -> Engine:
    """Without a drafter, which a budget would contradict."""
    return Engine(arguments.model, progress=progress, **_model(arguments))


def check(arguments: argparse.Namespace, drafters: list[str]) -> None:
    """Raises what the engines of these drafters would, before the run without one takes its time"""
    limits.budget(arguments.budget)
    limits.is_chain(arguments.tree)
    given = arguments.drafter_model
    if given is not None and "dflash" not in drafters:
        named = shown(", ".join(drafters))
        raise ValueError(f"--drafter-model is one of dflash, but the drafter is {named}")
    for name in drafters:
        config = limits.drafter(drafter(name, [], given))
        if isinstance(config, DflashConfig):
            config.directory(limits.directory(arguments.model))


def trained(arguments: argparse.Namespace) -> list[str]:
    """The name of the trained drafter, where one is given or beside the model; else none."""
    model = limits.DEMO if arguments.model is None else Path(arguments.model)
    has_one = arguments.drafter_model is not None or (model / BESIDE).is_dir()
    return ["dflash"] if has_one else []


def drafter(name: str, truth: list[list[int]], model: Path | None = None) -> str | DrafterConfig:
    """The drafter of a name; "oracle" and "oracle:0.8" (its accuracy) are fed with `truth`.

    truth: prompt and continuation, tokens, of each sequence that will be generated
    model: the directory of a dflash drafter, None for the one beside its model
    """
    kind, _, accuracy = name.partition(":")
    if name == "dflash" and model is not None:
        return DflashConfig(model=model)
    if kind != "oracle":
        return name
    try:
        right = float(accuracy or 1)
    except ValueError:
        wants = "oracle:ACCURACY, as oracle:0.8"
        raise ValueError(f"drafter is {shown(name)}, wants {wants}") from None
    return OracleConfig(truth=tuple(map(tuple, truth)), accuracy=right)


def is_oracle(name: str) -> bool:
    return name.partition(":")[0] == "oracle"


def _model(arguments: argparse.Namespace) -> dict:
    names = ("device", "dtype", "kv_cache_dtype", "quantize", "max_seq_len")
    return {name: getattr(arguments, name) for name in names}


def _budget(text: str) -> int | str:
    """Nodes, or "auto"."""
    return text if text == "auto" else whole(text)


def nodes(text: str) -> list[int]:
    """Sizes of trees, ascending: "1,8,16"."""
    allowed = {str(size): size for size in range(1, MAX_NODES + 1)}
    words = {word.strip() for word in text.split(",")}
    if not words <= allowed.keys():
        raise ValueError(f"nodes is {shown(text)}, wants numbers of 1 to {MAX_NODES}, as 1,8,16")
    return sorted(allowed[word] for word in words)


def whole(text: str) -> int:
    """An integer; what is none, or has more digits than Python reads, is argparse's to report."""
    try:
        return int(text)
    except ValueError:
        wants = "fewer digits" if text.strip("+-").isdecimal() else "an integer"
        raise argparse.ArgumentTypeError(f"{shown(text)}, wants {wants}") from None


def real(text: str) -> float:
    """A number; what is none is argparse's to report."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)}, wants a number") from None
