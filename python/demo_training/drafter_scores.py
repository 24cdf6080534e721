"""Scores of a drafter's candidates: the law of marginals and noise, edges, and their fit.

Of candidate v at depth j, with lq the drafter's log-probability, g the target's noise there and T
the temperature: x(v) = (a_j lq(v) + b_j T g(v)) / (1 + c_j T); its score is log-softmax of x over
the vocabulary. An edge from a to b adds l_j e(a, b) to lq(b); edges are normalised over the depth's
candidates and scaled to their mass. Trees are not known here.

Shape letters: n blocks, J depths, M candidates, W words, r rank.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Law:
    """[J] float32 each: of the marginals, the noise, the temperature; of selector and bigram."""

    a: Tensor
    b: Tensor
    c: Tensor
    selector: Tensor
    bigram: Tensor

    @staticmethod
    def plain(slots: int, device: torch.device) -> "Law":
        """The drafter's own log-probabilities, and nothing else."""
        one, zero = torch.ones(slots, device=device), torch.zeros(slots, device=device)
        return Law(one, zero, zero, zero, zero)

    def x(self, lq: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
        """lq, noise [n, J, ...]; temperature [n]; the bracket over what divides it."""
        shape = (1, -1) + (1,) * (lq.ndim - 2)
        a, b, c = (z.view(shape) for z in (self.a, self.b, self.c))
        t = temperature.view(-1, *(1,) * (lq.ndim - 1))
        return (a * lq + b * t * noise) / (1 + c * t)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a drafter knows of n blocks, and what came.

    lq, noise [n, J, W]; u [n, J, r] (P h); root [n]; token [n, J]; temperature [n]
    """

    lq: Tensor
    noise: Tensor
    u: Tensor
    root: Tensor
    token: Tensor
    temperature: Tensor

    def rows(self, index: Tensor | slice) -> "Drafted":
        return Drafted(
            *(
                x[index]
                for x in (self.lq, self.noise, self.u, self.root, self.token, self.temperature)
            )
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """The M best of each depth: id, score, lq, noise [n, J, M]."""

    id: Tensor
    score: Tensor
    lq: Tensor
    noise: Tensor

    @staticmethod
    def best(drafted: Drafted, law: Law, count: int) -> "Candidates":
        x = law.x(drafted.lq, drafted.noise, drafted.temperature)
        top, ids = x.topk(count, -1)
        score = top - x.logsumexp(-1, keepdim=True)
        return Candidates(ids, score, drafted.lq.gather(-1, ids), drafted.noise.gather(-1, ids))


@dataclass(frozen=True, slots=True)
class Tables:
    """before, after [W, r]: the selector's codebooks; bigram [W, W]: log P(column | row)."""

    before: Tensor
    after: Tensor
    bigram: Tensor


def bigram_table(data: Tensor, words: int, weight: float = 8.0) -> Tensor:
    """log P(next | token), [W, W] float32, of token ids [n]; `weight` is the unigram's count."""
    pair = torch.zeros(words * words, dtype=torch.float32, device=data.device)
    for piece in range(0, len(data) - 1, 1 << 24):
        part = data[piece : piece + (1 << 24) + 1].long()
        key = part[:-1] * words + part[1:]
        pair += torch.bincount(key, minlength=words * words)
    pair = pair.view(words, words)
    single = pair.sum(0) + 1.0
    single = single / single.sum()
    return ((pair + weight * single) / (pair.sum(1, keepdim=True) + weight)).log_()


def raw_edges(
    drafted: Drafted, c: Candidates, tables: Tables, before: Tensor
) -> tuple[Tensor, Tensor]:
    """The selector's and the bigram's e(a, b), [n, J, P, M], of predecessors before [n, J, P].

    The bigram says nothing at depth 1, whose predecessor the drafter knows.
    """
    keyed = tables.before[before] * drafted.u[:, :, None]
    selector = keyed @ tables.after[c.id].transpose(-1, -2)
    bigram = torch.zeros_like(selector)
    # log P(b | a) less its mean over the predecessors that the drafter thinks possible
    past = c.id[:, :-1]
    belief = c.lq[:, :-1].log_softmax(-1)
    pairs = tables.bigram[past[..., :, None], c.id[:, 1:, None, :]]  # [n, J - 1, M, M]
    mean = (belief[..., None] + pairs).logsumexp(-2)
    own = tables.bigram[before[:, 1:, :, None], c.id[:, 1:, None, :]]
    bigram[:, 1:] = own - mean[:, :, None]
    return selector, bigram


def edge_scores(
    law: Law, c: Candidates, temperature: Tensor, selector: Tensor, bigram: Tensor
) -> Tensor:
    """log-probabilities of the candidates after each predecessor, [n, J, P, M]."""
    shape = (1, -1, 1, 1)
    lq = c.lq[:, :, None] + law.selector.view(shape) * selector + law.bigram.view(shape) * bigram
    x = law.x(lq, c.noise[:, :, None], temperature)
    return x.log_softmax(-1) + c.score.logsumexp(-1)[:, :, None, None]


def minimise(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int = 25) -> Tensor:
    """The parameters [k] of a smooth loss, by L-BFGS."""
    p = start.clone().requires_grad_()
    search = torch.optim.LBFGS([p], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss(p)
        value.backward()
        return value

    search.step(closure)
    p = p.detach()
    return p if bool(torch.isfinite(p).all()) else start


def nats(x: Tensor, token: Tensor, group: Tensor) -> Tensor:
    """-log-softmax of x [n, W] at token [n], as the mean of the means of each group."""
    loss = x.logsumexp(-1) - x.gather(-1, token[:, None])[:, 0]
    return torch.stack([loss[group == g].mean() for g in group.unique()]).mean()


def fit_depth(lq: Tensor, noise: Tensor, token: Tensor, t: Tensor, form: str) -> Tensor:
    """(a, b, c) of one depth from lq, noise [n, W], token, t [n].

    form: "sharpen" fits a; "couple" a and b, of one temperature; "law" all three
    """
    free = {"sharpen": 1, "couple": 2, "law": 3}[form]
    rest = torch.tensor([1.0, 0.0, 0.0], device=lq.device)[free:]
    start = torch.tensor([1.0, 0.8, 0.1], device=lq.device)[:free]

    def loss(p: Tensor) -> Tensor:
        a, b, c = torch.cat((p, rest))
        x = (a * lq + b * t[:, None] * noise) / (1 + c.clamp(min=-0.5) * t[:, None])
        return nats(x, token, t)

    a, b, c = torch.cat((minimise(loss, start), rest)).tolist()
    return torch.tensor([a, b, max(c, -0.5)], device=lq.device)


def fit_law(drafted: Drafted, form: str) -> Law:
    """Each depth on its own; at T = 0 alone nothing tells of b and c, which stay 0."""
    if form != "sharpen" and not bool((drafted.temperature > 0).any()):
        form = "sharpen"
    rows = [
        fit_depth(
            drafted.lq[:, j], drafted.noise[:, j], drafted.token[:, j], drafted.temperature, form
        )
        for j in range(drafted.lq.shape[1])
    ]
    a, b, c = torch.stack(rows, 1)
    return Law(a, b, c, torch.zeros_like(a), torch.zeros_like(a))


def loss_of(law: Law, drafted: Drafted) -> list[float]:
    """Nats a token of each depth, the mean over temperatures."""
    return [
        round(
            float(
                nats(
                    (
                        law.a[j] * drafted.lq[:, j]
                        + law.b[j] * drafted.temperature[:, None] * drafted.noise[:, j]
                    )
                    / (1 + law.c[j] * drafted.temperature[:, None]),
                    drafted.token[:, j],
                    drafted.temperature,
                )
            ),
            4,
        )
        for j in range(len(law.a))
    ]


@torch.no_grad()
def edge_rows(drafted: Drafted, law: Law, tables: Tables, count: int) -> tuple[Tensor, ...]:
    """For the fit of edges: candidates after the token that truly came before.

    lq, noise, selector, bigram [n, J, M], the true token's place and whether it has one [n, J]
    """
    c = Candidates.best(drafted, law, count)
    before = torch.cat((drafted.root[:, None], drafted.token[:, :-1]), 1)
    selector, bigram = raw_edges(drafted, c, tables, before[..., None])
    match = c.id == drafted.token[..., None]
    return c.lq, c.noise, selector[:, :, 0], bigram[:, :, 0], match.int().argmax(-1), match.any(-1)


def fit_edges(drafted: Drafted, law: Law, tables: Tables, count: int, use: str) -> Law:
    """The law with weights of the edges fitted; use: "selector", "bigram" or "both"."""
    lq, noise, selector, bigram, place, known = edge_rows(drafted, law, tables, count)
    found = []
    for j in range(lq.shape[1]):
        keep = known[:, j]
        t = drafted.temperature[keep]
        mask = torch.tensor(
            [use != "bigram", use != "selector" and j > 0], dtype=torch.float32, device=lq.device
        )
        one = [z[keep, j] for z in (lq, noise, selector, bigram, place)]

        def loss(p: Tensor, j=j, t=t, mask=mask, one=one) -> Tensor:
            p = p * mask
            inner = one[0] + p[0] * one[2] + p[1] * one[3]
            x = (law.a[j] * inner + law.b[j] * t[:, None] * one[1]) / (1 + law.c[j] * t[:, None])
            return nats(x, one[4], t)

        start = torch.full((2,), 0.8 if use != "both" else 0.5, device=lq.device)
        found.append(minimise(loss, start) * mask if len(t) else torch.zeros_like(mask))
    selector, bigram = torch.stack(found, 1)
    return replace(law, selector=selector, bigram=bigram)
