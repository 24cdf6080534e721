"""Makes the small demo model that ships in `kdtree/demo/`: text, tokens, training, files, check.

A DeepSeek-V3-shaped model (MLA with q_lora, sigmoid-routed experts with bias balancing, one
shared expert, YaRN) of 24 M parameters, trained on permissively licensed text in about ten
minutes of one H200; its routed experts are INT4, group 32. The commands, in order:

    python python/train_demo.py corpus --out corpus
    python python/train_demo.py tokens --corpus corpus --out tokens.xz
    python python/train_demo.py train --tokens tokens.xz --out demo --seconds 480 --within 572
    python python/train_demo.py check --model demo
    python python/train_demo.py drafter --model demo --tokens tokens.xz --out demo/drafter

`corpus` needs a Debian machine with apt-get, dpkg and pip, and the package tokenizers; `train`
needs torch, numpy, safetensors and tokenizers, and no network; `check` runs on a CPU. `drafter`
trains the block-diffusion drafter of a model that `train` saved, in about ten minutes too. To try
the whole path on a CPU: `train --tokens tokens.xz --out try --device cpu --small --seconds 20`.
`speed` times several ways of running the experts and attention on the GPU at hand.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from demo_training.check import check
from demo_training.corpus import corpus
from demo_training.drafter import add_options, drafter
from demo_training.judge import Judge
from demo_training.plan import Plan, Run
from demo_training.save import save
from demo_training.shape import Shape, Weights
from demo_training.tokens import read_tokens, tokens
from demo_training.train import Trainer
from tokenizers import Tokenizer

AFTER = 35  # seconds kept for judging and saving
WAYS = ("grouped/flash", "bucket/flash", "dense/flash", "grouped/cudnn")  # experts/attention
TOLD = "seed batch length muon_lr adam_lr decay balance cool quantized long loop_rows".split()


def main(words: Sequence[str] | None = None) -> None:
    """words: of the command line; None for the process's own"""
    args = arguments(words)
    if args.stage == "corpus":
        corpus(args.out)
    elif args.stage == "tokens":
        tokens(args.corpus, args.out, args.millions, args.code, args.tokenizer)
    elif args.stage == "check":
        check(args.model)
    elif args.stage == "speed":
        speed(args)
    elif args.stage == "drafter":
        drafter(args)
    else:
        train(args)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("corpus", help="fetch and clean the text")
    stage.add_argument("--out", type=Path, required=True)
    stage = stages.add_parser("tokens", help="train the tokenizer and pack the tokens")
    stage.add_argument("--corpus", type=Path, required=True)
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--millions", type=float, default=65.3, help="training tokens at most")
    stage.add_argument("--code", type=float, default=0.62, help="share of them that are code")
    hint = "a model's tokenizer.json; by default one is trained"
    stage.add_argument("--tokenizer", type=Path, help=hint)
    stage = stages.add_parser("check", help="recompute the held-out loss of a saved model")
    stage.add_argument("--model", type=Path, required=True)
    stage = stages.add_parser("train", help="train, judge and save")
    add_plan(stage, seconds=480)
    stage.add_argument("--way", default=WAYS[0], help="experts/attention")
    hint = "seconds of the whole process; cuts training short"
    stage.add_argument("--within", type=float, default=570, help=hint)
    stage.add_argument("--out", type=Path, required=True)
    stage = stages.add_parser("speed", help="time ways of training")
    add_plan(stage, seconds=8)
    stage.add_argument("--ways", nargs="+", default=WAYS)
    add_options(stages.add_parser("drafter", help="train, fit, judge and save a model's drafter"))
    words = ["drafter" if word == "--drafter" else word for word in words or sys.argv[1:]]
    return parser.parse_args(words)


def add_plan(stage: argparse.ArgumentParser, seconds: float) -> None:
    """The options that `train` and `speed` share."""
    stage.add_argument("--tokens", type=Path, required=True)
    stage.add_argument("--seconds", type=float, default=seconds)
    stage.add_argument("--device", default="cuda")
    stage.add_argument("--small", action="store_true", help="a toy shape")
    stage.add_argument("--compile", action=argparse.BooleanOptionalAction)
    plan = Plan(seconds=0)
    for option in TOLD:
        value = getattr(plan, option)
        stage.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)


def plan_of(args: argparse.Namespace, way: str) -> Plan:
    cpu = args.device == "cpu"
    experts, backend = way.split("/")
    return Plan(
        seconds=args.seconds,
        way=experts,
        backend="math" if cpu else backend,
        compiled=not cpu if args.compile is None else args.compile,
        **{option: getattr(args, option) for option in TOLD},
    )


def trainer_of(plan: Plan, args: argparse.Namespace) -> Trainer:
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    shape = Shape.small() if args.small else Shape()
    return Trainer(plan, Weights(shape).to(args.device))


def train(args: argparse.Namespace) -> None:
    """Training, judgement and files; whatever fails after training starts, what exists is saved."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    begin = time.perf_counter()

    def stamp(what: str) -> None:
        print(f"[{time.perf_counter() - begin:5.1f} s] {what}", flush=True)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_tokens, args.tokens)
        trainer = trainer_of(plan_of(args, args.way), args)
        trainer.warm_up()
        stamp("compiled")
        header, sets = reading.result()
    left = args.within - (time.perf_counter() - begin) - AFTER
    trainer.plan = replace(trainer.plan, seconds=min(args.seconds, left))
    tokenizer = Tokenizer.from_str(header["tokenizer"])
    data = torch.from_numpy(sets["train"].astype(np.int32)).to(args.device)
    stamp(f"{len(data) / 1e6:.1f} M training tokens")
    log = dict(
        command=shlex.join(["python", *sys.argv]),
        documents=header["documents"],
        tokens=header["sets"],
        sources=header["sources"],
    )
    try:
        run = trainer.train(data)
        stamp(
            f"trained: {run.steps} steps, {run.tokens / 1e6:.1f} M tokens, "
            f"{run.tokens / run.seconds / 1e6:.3f} M tokens/s"
        )
        log["held_out"] = judge(trainer, tokenizer, sets, log, args.device == "cpu")
        stamp("judged")
    finally:
        log["whole_seconds"] = round(time.perf_counter() - begin, 1)
        save(args.out, trainer, tokenizer, log)
        stamp(f"saved in {args.out}: {sum(log['bytes'].values()) / 1e6:.2f} MB")


def judge(trainer: Trainer, tokenizer: Tokenizer, sets: dict, log: dict, quick: bool) -> dict:
    """Held-out figures into the log and onto the screen, with a few samples."""
    judged = Judge(trainer, tokenizer)
    held = judged.held_out(sets)
    for kind, figures in held.items():
        print(kind, {k: v for k, v in figures.items() if k != "check"}, flush=True)
    loops, shown = judged.samples(sets, 3 if quick else 96, 24 if quick else 128)
    log |= dict(loops=loops, samples=shown)
    for name, figures in loops.items():
        print(name, figures, flush=True)
    for sample in shown[::4]:
        print(
            f"--- {sample['kind']} T={sample['temperature']}\n{sample['prompt']} >>> "
            f"{sample['text']}",
            flush=True,
        )
    return held


def speed(args: argparse.Namespace) -> None:
    """Trains each way for a few seconds from the same start and prints what it reached."""
    _, sets = read_tokens(args.tokens)
    data = torch.from_numpy(sets["train"].astype(np.int32)).to(args.device)
    for way in args.ways:
        torch.compiler.reset()
        begin = time.perf_counter()
        try:
            trainer = trainer_of(replace(plan_of(args, way), long=0.0), args)
            trainer.warm_up()
            compiled = time.perf_counter() - begin
            run: Run = trainer.train(data)
        except Exception as error:  # noqa: BLE001 - a way that does not run here is an answer too
            print(f"{way}: failed: {type(error).__name__}: {str(error)[:500]}", flush=True)
            continue
        memory = torch.cuda.max_memory_allocated() / 1e9 if args.device == "cuda" else 0
        print(
            f"{way}: {run.tokens / run.seconds / 1e6:.3f} M tokens/s, {run.steps} steps, "
            f"compiled in {compiled:.1f} s, {memory:.1f} GB, last {run.curve[-1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
