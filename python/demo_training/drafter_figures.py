"""The scores fitted on text of its own, and the figures on held-out text.

Calibration text continues training prompts but is no cohort's: nothing was trained on it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from demo_training.drafter_judge import drafted, loops, simulate
from demo_training.drafter_scores import (
    Drafted,
    Law,
    Tables,
    bigram_table,
    edge_rows,
    fit_edges,
    fit_law,
    loss_of,
)
from demo_training.drafter_text import anchor_weights, spread, windows, write
from demo_training.drafter_train import DraftTrainer

TEMPERATURES = 0.0, 0.7, 1.0
CALIBRATION_SEED, JUDGE_SEED = 10**12, 2 * 10**12


def joined(parts: list[Drafted]) -> Drafted:
    return Drafted(
        *(torch.cat([getattr(p, n) for p in parts]) for n in Drafted.__dataclass_fields__)
    )


class Calibration:
    """Every law by name, of each temperature and of all; `shipped` is the law with the selector."""

    def __init__(self, trainer: DraftTrainer, data: Tensor, small: bool, draw: Callable) -> None:
        self.trainer, self.report = trainer, {}
        w, device = trainer.weights, trainer.device
        self.tables = Tables(w.before.detach(), w.after.detach(), bigram_table(data, w.shape.words))
        rows = self.draft(data, 3 if small else 2048, draw)
        self.plain = Law.plain(trainer.slots, device)
        self.one: dict[float, dict[str, Law]] = {}
        for t in TEMPERATURES:
            own = rows.rows(rows.temperature == torch.tensor(t, device=device))
            self.one[t] = {n: fit_law(own, n) for n in ("sharpen", "couple")}
            self.note(f"T={t}", own, self.one[t] | dict(plain=self.plain))
        law = fit_law(rows, "law")
        self.all = dict(law=law)
        self.note("all T", rows, dict(law=law))
        for t in TEMPERATURES:
            own = rows.rows(rows.temperature == torch.tensor(t, device=device))
            self.note(f"T={t}", own, dict(law=law))
        for use in ("selector", "bigram", "both"):
            fitted = fit_edges(rows, law, self.tables, w.shape.candidates, use)
            self.all[f"law + {use}"] = fitted
            self.report[f"law + {use}"] = {
                n: [round(x, 4) for x in getattr(fitted, n).tolist()]
                for n in ("selector", "bigram")
            }
        known = edge_rows(rows, law, self.tables, w.shape.candidates)[-1]
        share = known.float().mean(0).tolist()
        self.report["among candidates"] = [round(x, 4) for x in share]
        self.shipped = self.all["law + selector"]

    def draft(self, data: Tensor, count: int, draw: Callable) -> Drafted:
        """Blocks from texts of every temperature, away from their loops."""
        trainer, parts = self.trainer, []
        random = torch.Generator().manual_seed(trainer.plan.seed + 1)
        device = trainer.device
        anchors = torch.Generator(device).manual_seed(trainer.plan.seed + 1)
        for t in TEMPERATURES:
            prompts = windows(data, count, 16 if count < 64 else 64, random)
            seed = CALIBRATION_SEED + torch.arange(count, device=device)
            length = prompts.shape[1] + (16 if count < 64 else 128)
            temperature = torch.full((count,), t, device=device)
            text = write(trainer.target, prompts, length, temperature, seed, draw)
            weight = anchor_weights(text, trainer.slots)
            weight[:, : text.prompt] = 0
            for part in torch.arange(count, device=device).split(256):
                anchor = torch.multinomial(weight[part], 4, True, generator=anchors)
                parts.append(drafted(trainer, text.rows(part), anchor))
        return joined(parts)

    def note(self, name: str, rows: Drafted, laws: dict[str, Law]) -> None:
        for law_name, law in laws.items():
            entry = dict(nats=loss_of(law, rows))
            if law_name != "plain":
                entry |= {
                    n: [round(x, 4) for x in getattr(law, n).tolist()] for n in ("a", "b", "c")
                }
            self.report[f"{name} {law_name}"] = entry

    def laws(self, t: float) -> dict[str, Law]:
        """What is judged at a temperature: no coupling, coupled there, the law and its edges."""
        zero = torch.zeros_like(self.plain.b)
        named = dict(plain=self.plain, sharpened=self.one[t]["sharpen"]) | self.all
        if t:
            named["coupled at T"] = self.one[t]["couple"]
            free = self.one[t]["sharpen"]
            named["sharpened + selector"] = replace(free, b=zero, selector=self.shipped.selector)
        return named


def evaluate(
    calibration: Calibration, held: dict[str, Tensor], small: bool, draw: Callable
) -> Iterator[tuple[str, dict]]:
    """Figures by text and temperature: tokens a round by law and tree, and how much loops."""
    trainer = calibration.trainer
    count, prompt, new = (2, 16, 8) if small else (192, 64, 128)
    for kind, data in held.items():
        for t in TEMPERATURES:
            device = trainer.device
            prompts = spread(data, count, prompt)
            temperature = torch.full((count,), t, device=device)
            seed = JUDGE_SEED + torch.arange(count, device=device)
            length = prompt + new + trainer.weights.shape.block
            text = write(trainer.target, prompts, length, temperature, seed, draw)
            figures = simulate(
                trainer, text, new, calibration.laws(t), calibration.tables, 8 if small else 16
            )
            looped = round(float(loops(text, new).float().mean()), 3)
            yield f"{kind} T={t}", dict(looping=looped, prompts=count) | figures
