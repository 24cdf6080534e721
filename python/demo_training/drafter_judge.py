"""What a trained drafter is worth: tokens a round, simulated on the target's own text.

The target's tokens do not depend on the drafter, so a round from every token of a written text
tells what any run of rounds would have done. A node is in the best-first tree of B nodes where
fewer than B nodes score higher. Fitting is not known here.
"""

import torch
from torch import Tensor

from demo_training.drafter_model import ahead
from demo_training.drafter_noise import gumbel
from demo_training.drafter_scores import (
    Candidates,
    Drafted,
    Law,
    Tables,
    edge_scores,
    raw_edges,
)
from demo_training.drafter_text import Text
from demo_training.drafter_train import DraftTrainer
from demo_training.judge import share_distinct

BUDGETS = (7, 15, 31, 63)


@torch.no_grad()
def drafted(trainer: DraftTrainer, text: Text, anchor: Tensor) -> Drafted:
    """Of blocks at anchors [n, A] of n sequences, flattened to n * A."""
    target, slots = trainer.target, trainer.slots
    hidden = trainer.hidden(text, anchor).float().flatten(0, 1)
    lq = target.logits(hidden).log_softmax(-1)
    place = anchor[..., None] + 1 + torch.arange(slots, device=anchor.device)
    seed = text.seed[:, None, None].expand_as(place)
    noise = gumbel(seed.flatten(), place.flatten(), lq.shape[-1]).view_as(lq)
    return Drafted(
        lq,
        noise,
        hidden @ trainer.weights.project.T,
        text.tokens.gather(1, anchor).flatten(),
        ahead(text.tokens, anchor, slots, 1).flatten(0, 1),
        text.temperature[:, None].expand_as(anchor).flatten(),
    )


def scored(d: Drafted, law: Law, tables: Tables, count: int) -> tuple[Candidates, Tensor]:
    """Candidates and the score of each after each, [n, J, M, M] (depth 1: after the root)."""
    c = Candidates.best(d, law, count)
    if not bool((law.selector != 0).any() | (law.bigram != 0).any()):
        return c, c.score[:, :, None].expand(-1, -1, count, -1)
    root = d.root[:, None, None].expand(-1, 1, count)
    before = torch.cat((root, c.id[:, :-1]), 1)
    return c, edge_scores(law, c, d.temperature, *raw_edges(d, c, tables, before))


def accepted(c: Candidates, edges: Tensor, token: Tensor) -> dict[str, Tensor]:
    """Draft tokens that a round from each block accepts, [n], by the kind of tree."""
    n, slots, count, _ = edges.shape
    row = torch.arange(n, device=token.device)
    match = c.id == token[..., None]
    place, known = match.int().argmax(-1), match.any(-1).cumprod(1).bool()
    # the true path's scores, the best nodes' of each depth, and the chain's tokens
    path, here = [], torch.zeros(n, device=token.device)
    nodes, score, last = [], edges[:, 0, 0], torch.arange(count, device=token.device).expand(n, -1)
    chain, at = [], edges[:, 0, 0].argmax(-1)
    for j in range(slots):
        if j:
            here = here + edges[row, j, place[:, j - 1], place[:, j]]
            at = edges[row, j, at].argmax(-1)
            grown = score[..., None] + edges[:, j].gather(1, last[..., None].expand(-1, -1, count))
            score, last = grown.flatten(1), None
        else:
            here = edges[row, 0, 0, place[:, 0]]
        path.append(here)
        chain.append(c.id[row, j, at] == token[:, j])
        score, kept = score.topk(min(BUDGETS[-1], score.shape[1]), -1)
        last = kept % count
        nodes.append(score)
    path = torch.stack(path, 1)
    best = torch.cat(nodes, 1).topk(BUDGETS[-1], -1).values
    found = {"chain": torch.stack(chain, 1).cumprod(1).sum(1)}
    for budget in BUDGETS:
        inside = known & (path >= best[:, budget - 1 : budget])
        found[f"tree {budget}"] = inside.cumprod(1).sum(1)
    return found


def rounds(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and rounds of each sequence, bonus included; lengths [n, A] accepted at each token."""
    n, a = lengths.shape
    at = torch.zeros(n, dtype=torch.int64, device=lengths.device)
    count, row = torch.zeros_like(at), torch.arange(n, device=lengths.device)
    for _ in range(a):
        going = at < a
        step = lengths[row, at.clamp(max=a - 1)] + 1
        at, count = at + step * going, count + going
    return at, count


def loops(text: Text, new: int) -> Tensor:
    """Which sequences' new tokens loop: under half distinct 4-grams in their second half; [n]."""
    rows = text.tokens[:, text.prompt + new // 2 : text.prompt + new].tolist()
    return torch.tensor([share_distinct(x) < 0.5 for x in rows], device=text.tokens.device)


def simulate(
    trainer: DraftTrainer, text: Text, new: int, laws: dict[str, Law], tables: Tables, each: int
) -> dict[str, dict[str, float]]:
    """Tokens a round by law and kind of tree, over `new` tokens from the prompt's last on.

    Also, of the tree of 7, the standard error and the figure on the texts that do not loop.
    """
    device, count = text.tokens.device, trainer.weights.shape.candidates
    place = text.prompt + torch.arange(new, device=device)
    lengths: dict[tuple[str, str], list[Tensor]] = {}
    for part in torch.arange(len(text), device=device).split(each):
        rows = text.rows(part)
        anchor = place.expand(len(part), -1).contiguous()
        d = drafted(trainer, rows, anchor)
        for name, law in laws.items():
            c, edges = scored(d, law, tables, count)
            for kind, value in accepted(c, edges, d.token).items():
                lengths.setdefault((name, kind), []).append(value.view(len(part), new))
    calm = ~loops(text, new)
    found: dict[str, dict[str, float]] = {}
    for (name, kind), values in lengths.items():
        tokens, count_of = rounds(torch.cat(values))
        figures = found.setdefault(name, {})
        figures[kind] = round(float(tokens.sum() / count_of.sum()), 3)
        if kind == "tree 7":
            error = (tokens / count_of).std() / len(tokens) ** 0.5
            figures["tree 7 error"] = round(float(error), 3)
            if bool(calm.any()):
                share = tokens[calm].sum() / count_of[calm].sum()
                figures["tree 7 calm"] = round(float(share), 3)
    return found
