"""The stage `drafter`: text by the target, training, fitted scores, figures, files.

Files are written as soon as training ends, and again once there is more to say. What fails after
that is in the log, and costs nothing that was there before.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.drafter_figures import Calibration, evaluate
from demo_training.drafter_model import DraftShape, DraftWeights
from demo_training.drafter_noise import draw
from demo_training.drafter_save import save
from demo_training.drafter_scores import Law
from demo_training.drafter_target import Target
from demo_training.drafter_text import Part, Text, write_part
from demo_training.drafter_train import DraftPlan, DraftTrainer
from demo_training.tokens import read_tokens

AFTER = 85  # seconds kept for fitting, judging and saving
TOLD = "seed rows anchors muon_lr adam_lr decay gamma cool quantized select joint cohorts".split()


def add_options(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--model", type=Path, required=True, help="the target's directory")
    stage.add_argument("--tokens", type=Path, required=True)
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--seconds", type=float, default=330, help="of training")
    hint = "seconds of the whole process; cuts training short"
    stage.add_argument("--within", type=float, default=570, help=hint)
    stage.add_argument("--device", default="cuda")
    stage.add_argument("--small", action="store_true", help="a toy shape")
    stage.add_argument("--compile", action=argparse.BooleanOptionalAction)
    plan = DraftPlan(seconds=0)
    for option in TOLD:
        value = getattr(plan, option)
        stage.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)


def plan_of(args: argparse.Namespace) -> DraftPlan:
    cpu = args.device == "cpu"
    told = {option: getattr(args, option) for option in TOLD}
    if args.small:
        told |= dict(rows=192, anchors=64)
    compiled = not cpu if args.compile is None else args.compile
    return DraftPlan(seconds=args.seconds, compiled=compiled, **told)


def command(args: argparse.Namespace) -> str:
    """As one would type it in the repository, without the names of places."""
    kept = {n: v for n, v in vars(args).items() if n in ("seconds", "within", "small", *TOLD)}
    plan = DraftPlan(seconds=0)
    words = [
        f"--{n.replace('_', '-')}" + ("" if v is True else f" {v:g}")
        for n, v in kept.items()
        if v is not False and v != getattr(plan, n, None)
    ]
    start = "python python/train_demo.py drafter --model kdtree/demo --tokens tokens.xz --out OUT"
    return " ".join([start, *words])


def read(args: argparse.Namespace) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and sets of the token file, which must be of the model's own tokenizer."""
    header, sets = read_tokens(args.tokens)
    own = Tokenizer.from_file(str(args.model / "tokenizer.json")).to_str()
    if Tokenizer.from_str(header["tokenizer"]).to_str() != own:
        raise ValueError(f"{args.tokens}: its tokenizer is not that of {args.model}")
    return header, sets


def quick_draw(target: Target, compiled: bool) -> Callable:
    """The sampler's draw, compiled where that works and draws the same."""
    if not compiled:
        return draw
    try:
        quick = torch.compile(draw, dynamic=True)
        random = torch.Generator(target.device).manual_seed(0)
        for n in (96, 513):
            size = (n, target.shape.words)
            logits = torch.randn(size, generator=random, device=target.device) * 4
            t = torch.rand(n, generator=random, device=target.device).round(decimals=1)
            seed = torch.randint(2**62, (n,), generator=random, device=target.device)
            told = quick(logits, t, seed, seed % 4096), draw(logits, t, seed, seed % 4096)
            if float((told[0] != told[1]).float().mean()) > 0.02:
                raise ArithmeticError("the compiled draw draws other tokens")
        return quick
    except Exception as error:  # noqa: BLE001 - a compiler's failure of any kind
        print(f"draw not compiled: {str(error)[:300]}", file=sys.stderr, flush=True)
        return draw


class Session:
    """One run of the stage: what it has, and what it has found so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.perf_counter()
        self.law: Law | None = None
        self.log: dict = dict(command=command(args))
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        device, shape = torch.device(args.device), DraftShape()
        if args.small:
            shape = DraftShape.small()
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read, args)
            target = Target(args.model, shape.taps, 4096, device)
            self.trainer = DraftTrainer(plan_of(args), DraftWeights(shape).to(device), target)
            self.draw = quick_draw(target, self.trainer.plan.compiled)
            header, self.sets = reading.result()
        self.log["tokens"] = header["sets"]
        self.data = self.tensor("train")
        self.random = torch.Generator().manual_seed(args.seed)
        self.stamp("read and ready")

    def tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.sets[name].astype(np.int32)).to(self.trainer.device)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def stamp(self, what: str) -> None:
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0
        print(f"[{self.elapsed:5.1f} s] {what}, {memory:.0f} GB at most", flush=True)

    def cohort(self) -> list[Text]:
        target = self.trainer.target
        texts = [
            write_part(target, part, self.data, self.random, self.draw)
            for part in Part.of(self.args.small)
        ]
        if target.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return texts

    def train(self) -> None:
        """Writes a cohort of text, trains on it, and so on; leaves the drafter as it is saved."""
        trainer, start = self.trainer, self.elapsed
        texts = self.cohort()
        writing = self.elapsed - start
        new = sum(p.sequences * (p.length - p.prompt) for p in Part.of(self.args.small))
        self.log["written_tokens_a_cohort"] = new
        self.stamp(f"{new / 1e6:.2f} M tokens written in {writing:.1f} s")
        trainer.warm_up(texts)
        self.stamp("compiled")
        count, after = trainer.plan.cohorts, min(AFTER, 0.3 * self.args.within)
        left = self.args.within - self.elapsed - after - (count - 1) * writing
        trainer.plan = replace(trainer.plan, seconds=max(1.0, min(self.args.seconds, left)))
        try:
            for k in range(count):
                if k:
                    del texts
                    texts = self.cohort()
                trainer.train(texts, (k + 1) / count)
        except Exception as error:  # noqa: BLE001 - what was trained so far is worth having
            self.failed("training", error)
        run = trainer.run
        self.stamp(
            f"trained: {run.steps} steps, {run.tokens / 1e6:.1f} M anchors, "
            f"{run.tokens / max(run.seconds, 1e-9) / 1e3:.0f} k anchors/s"
        )

    def finish(self) -> None:
        """Fits the scores and judges."""
        trainer = self.trainer
        if trainer.device.type == "cuda":
            torch.cuda.empty_cache()
        calibration = Calibration(trainer, self.data, self.args.small, self.draw)
        self.law, self.log["fit"] = calibration.shipped, calibration.report
        self.save()
        self.stamp("fitted")
        held = {kind: self.tensor(f"held_{kind}") for kind in ("code", "prose")}
        self.log["judged"] = {}
        for name, figures in evaluate(calibration, held, self.args.small, self.draw):
            self.log["judged"][name] = figures
            print(name, figures, flush=True)
            self.save()
            if self.elapsed > self.args.within:
                raise TimeoutError(f"{self.args.within:g} s are over")
        self.stamp("judged")

    def failed(self, what: str, error: Exception) -> None:
        traceback.print_exc()
        told = f"{what}: {type(error).__name__}: {str(error)[:500]}"
        self.log.setdefault("failures", []).append(told)

    def save(self) -> None:
        self.log["whole_seconds"] = round(self.elapsed, 1)
        save(self.args.out, self.trainer, self.law, self.log)


def drafter(args: argparse.Namespace) -> None:
    """Training, scores, figures and files; whatever fails after training, what exists is saved."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    session = Session(args)
    trainer = session.trainer
    try:
        session.train()
    finally:
        trainer.clear()
        trainer.set_pieces(False)
        trainer.refresh(True)
        session.save()
    try:
        session.finish()
    except Exception as error:  # noqa: BLE001 - the drafter itself is saved
        session.failed("judging", error)
    finally:
        session.save()
    sizes = session.log["bytes"]
    session.stamp(f"saved in {args.out}: {sum(sizes.values()) / 1e6:.2f} MB")
