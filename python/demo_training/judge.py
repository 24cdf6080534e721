"""What a trained demo model is worth.

Held-out loss with bfloat16 and with INT4 routed experts, agreement of the two, loss by position,
sample continuations and how many of them loop.
"""

import math

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.model import Parts, forward, rms
from demo_training.plan import LONG
from demo_training.train import Trainer

WINDOWS = 96  # held-out windows of each set that are scored


class Judge:
    """Scores and samples a trainer's weights, with plain, un-compiled parts."""

    def __init__(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        self.trainer, self.weights = trainer, trainer.weights
        self.device, self.tokenizer = trainer.device, tokenizer
        self.parts = Parts.make(False)
        spelled = [tokenizer.id_to_token(i) or "" for i in range(self.weights.shape.words)]
        self.bytes = torch.tensor([0, 0, 0, *map(len, spelled[3:])], device=self.device)

    def logits(self, tokens: Tensor) -> Tensor:
        w, plan, routed = self.weights, self.trainer.plan, self.trainer.routed
        x, _ = forward(
            self.parts,
            w,
            routed["experts_in"],
            routed["experts_out"],
            tokens,
            self.trainer.angles,
            plan.backend,
            plan.way,
        )
        x = rms(x.view(*tokens.shape, -1), w.norm.to(x.dtype), w.shape.eps)
        return (x @ w.head.to(x.dtype).T).float()

    @torch.no_grad()
    def score(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """-log p of every target and the most likely token, [N, T]."""
        loss, best = [], []
        for rows in windows.split(max(1, 16384 // windows.shape[1])):
            logits = self.logits(rows[:, :-1])
            picked = logits.gather(-1, rows[:, 1:, None])[..., 0]
            loss.append(logits.logsumexp(-1) - picked)
            best.append(logits.argmax(-1))
        return torch.cat(loss), torch.cat(best)

    def figures(self, windows: Tensor, loss: Tensor) -> dict[str, float]:
        nats, size = float(loss.double().sum()), int(self.bytes[windows[:, 1:]].sum())
        return dict(
            nats_per_token=round(nats / loss.numel(), 4),
            bits_per_byte=round(nats / math.log(2) / size, 4),
            windows=len(windows),
        )

    def held_out(self, sets: dict[str, np.ndarray]) -> dict:
        """All held-out figures, and the windows that `check` recomputes."""
        t, result = self.trainer.plan.length, {}
        for kind in ("code", "prose"):
            data = sets[f"held_{kind}"]
            windows, short = cut(data, t, WINDOWS, self.device), cut(data, 256, 4, self.device)
            far = cut(data, LONG * t, 12, self.device)
            self.trainer.experts(False)
            plain, best = self.score(windows)
            self.trainer.experts(True)
            packed, packed_best = self.score(windows)
            ends = [0, t // 2, t, 2 * t, 4 * t]
            by_position = self.score(far)[0].mean(0)
            result[kind] = dict(
                bf16=self.figures(windows, plain),
                int4=self.figures(windows, packed),
                top1_agreement=round(float((best == packed_best).float().mean()), 4),
                int4_by_position={
                    f"{a}-{b}": round(float(by_position[a:b].mean()), 4)
                    for a, b in zip(ends, ends[1:], strict=False)
                },
                check=dict(windows=short.tolist(), nats=float(self.score(short)[0].mean())),
            )
        return result

    @torch.no_grad()
    def continuations(self, prompts: Tensor, count: int, temperature: float) -> Tensor:
        random = torch.Generator(self.device).manual_seed(1)
        rows = prompts
        for _ in range(count):
            logits = self.logits(rows)[:, -1]
            if temperature > 0:
                noise = torch.rand(logits.shape, generator=random, device=self.device)
                logits = logits / temperature - torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
            rows = torch.cat((rows, logits.argmax(-1, keepdim=True)), 1)
        return rows[:, prompts.shape[1] :]

    def samples(
        self, sets: dict[str, np.ndarray], each: int, count: int
    ) -> tuple[dict, list[dict]]:
        """Share of continuations that loop (under half distinct 4-grams in their second half),
        and a few of them to read."""
        loops, shown = {}, []
        for kind in ("code", "prose"):
            prompts = document_starts(sets[f"held_{kind}"], 48, each, self.device)
            for temperature in (0.0, 0.7):
                told = self.continuations(prompts, count, temperature).tolist()
                distinct = [share_distinct(row[count // 2 :]) for row in told]
                loops[f"{kind} T={temperature}"] = dict(
                    looping=round(sum(d < 0.5 for d in distinct) / len(told), 3),
                    distinct4=round(sum(distinct) / len(told), 3),
                    prompts=len(told),
                )
                for prompt, row in list(zip(prompts.tolist(), told, strict=True))[:4]:
                    shown.append(
                        dict(
                            kind=kind,
                            temperature=temperature,
                            prompt=self.tokenizer.decode(prompt),
                            text=self.tokenizer.decode(row),
                        )
                    )
        return loops, shown


def cut(data: np.ndarray, length: int, most: int, device: torch.device) -> Tensor:
    """Up to `most` windows [length + 1] spread over the set."""
    count = max(1, min(most, (len(data) - 1) // length))
    starts = np.linspace(0, len(data) - 1 - length, count).astype(int)
    rows = [data[s : s + length + 1].astype(np.int64) for s in starts]
    return torch.from_numpy(np.stack(rows)).to(device)


def document_starts(data: np.ndarray, length: int, most: int, device: torch.device) -> Tensor:
    """The first tokens of documents (which begin with EOT), one row each."""
    starts = np.flatnonzero(data == 0)
    starts = starts[np.diff(np.append(starts, len(data))) > length][:most]
    rows = np.stack([data[s : s + length].astype(np.int64) for s in starts])
    return torch.from_numpy(rows).to(device)


def share_distinct(row: list[int]) -> float:
    grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
    return len(set(grams)) / len(grams)
