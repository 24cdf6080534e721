from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from says import says
from tolerance import assert_close
from torch import Tensor
from torch.library import opcheck

from kdtree import ops


@dataclass
class Case:
    score: Tensor
    candidate: Tensor
    token: Tensor
    length: Tensor
    temperature: Tensor
    a: Tensor
    c: Tensor
    more: Tensor | None
    weight: Tensor | None
    direction: Tensor | None
    before: Tensor | None
    after: Tensor | None

    def args(self, device) -> list:
        given = (getattr(self, field.name) for field in fields(self))
        return [x if x is None else x.to(device) for x in given]

    def run(self, device="cpu") -> Tensor:
        return ops.edge_scores(*self.args(device))


def random_case(B, J, M, W, R, dtype, rng, more=True) -> Case:
    def rand(*shape):
        return torch.randn(shape, generator=rng)

    candidate = torch.stack([torch.randperm(W, generator=rng)[:M] for _ in range(B * J)])
    length = torch.randint(1, 9, (B,), generator=rng, dtype=torch.int32)
    token = torch.randint(0, W, (B, 8), generator=rng)
    token[torch.arange(8) >= length[:, None]] = 2**62
    selector = [rand(J), rand(B, J, R), rand(W, R).to(dtype), rand(W, R).to(dtype)]
    return Case(
        (2 * rand(B, J, W)).log_softmax(-1)[..., :M].contiguous(),
        candidate.view(B, J, M),
        token,
        length,
        torch.rand(B, generator=rng),
        1 + torch.rand(J, generator=rng),
        torch.rand(J, generator=rng),
        rand(B, J, M, M) if more else None,
        *(selector if R else [None] * 4),
    )


def log_sum(x):
    top = x.max(-1, keepdims=True)
    return top + np.log(np.exp(x - top).sum(-1, keepdims=True))


def edge_scores_ref(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """[B, J, M, M] and the magnitude of what is summed, float64."""
    x = {k: v if v is None else v.double().numpy() for k, v in vars(case).items()}
    score, more, candidate = x["score"], x["more"], case.candidate.numpy()
    B, J, M = score.shape
    edge, size = np.zeros((B, J, M, M)), np.zeros((B, J, M, M))
    for b, j in np.ndindex(B, J):
        root = int(case.token[b, int(case.length[b]) - 1])
        if case.before is not None:
            start = x["before"][candidate[b, j - 1] if j else [root] * M] * x["direction"][b, j]
            end, weight = x["after"][candidate[b, j]], x["weight"][j]
            edge[b, j] = weight * start @ end.T
            size[b, j] = abs(weight) * abs(start) @ abs(end).T
        if more is not None:
            edge[b, j] += more[b, j]
            size[b, j] += abs(more[b, j])
    factor = (x["a"] / (1 + x["c"] * x["temperature"][:, None]))[..., None, None]
    moved = score[:, :, None] + factor * edge
    mass = log_sum(score)[:, :, None]
    scale = 1 + abs(score[:, :, None]) + factor * size.max(-1, keepdims=True) + abs(mass)
    return moved - log_sum(moved) + mass, scale + abs(moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "B, J, M, W, R, more",
    [
        (1, 1, 1, 1, 1, False),
        (2, 3, 5, 40, 7, True),
        (1, 7, 32, 99, 32, False),
        (3, 2, 64, 70, 40, True),
        (2, 3, 33, 50, 0, True),
        (1, 2, 6, 20, 0, False),
    ],
)
def test_matches_float64(B, J, M, W, R, more, dtype, device, rng):
    case = random_case(B, J, M, W, R, dtype, rng, more)
    assert_close("edge_scores", case.run(device), *edge_scores_ref(case))


def test_candidates_keep_their_mass(device, rng):
    case = random_case(2, 4, 9, 30, 8, torch.float32, rng)
    mass = case.score.logsumexp(-1, keepdim=True).expand(-1, -1, 9)
    torch.testing.assert_close(case.run(device).cpu().logsumexp(-1), mass)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_score(bad, device, rng):
    case = random_case(2, 3, 5, 30, 4, torch.float32, rng)
    case.score[0, 1, 2], case.direction[1, 2, 0], case.more[1, 0, 3, 1] = bad, bad, bad
    got = case.run(device).cpu()
    never = torch.zeros(2, 3, 5, dtype=torch.bool)
    never[0, 1], never[1, 2], never[1, 0, 3] = True, True, True
    assert (got[never] == -torch.inf).all() and got[~never].isfinite().all()


def test_a_candidate_without_a_score_stays_so(device, rng):
    case = random_case(1, 2, 5, 30, 4, torch.float32, rng)
    case.score[0, 1, 3], case.score[0, 0] = -torch.inf, -torch.inf
    got = case.run(device).cpu()
    assert (got[0, 0] == -torch.inf).all() and (got[0, 1, :, 3] == -torch.inf).all()
    assert got[0, 1, :, [0, 1, 2, 4]].isfinite().all()


def test_ids_out_of_range_read_the_nearest(device, rng):
    case = random_case(1, 2, 3, 10, 4, torch.float32, rng)
    case.candidate[0] = torch.tensor([[0, 9, 5], [0, 9, 9]])
    want = case.run(device)
    case.candidate[0] = torch.tensor([[-7, 2**40, 5], [-(2**62), 10, 2**62]])
    assert torch.equal(case.run(device), want)


def test_rows_are_invariant(device, rng):
    """A depth has the same bits whatever the other sequences and depths are."""
    case = random_case(3, 4, 17, 60, 35, torch.float32, rng)
    whole = case.run(device)
    sequence = ("score", "candidate", "token", "length", "temperature", "more", "direction")
    for b in range(3):
        own = {name: getattr(case, name)[b : b + 1] for name in sequence}
        assert torch.equal(replace(case, **own).run(device), whole[b : b + 1])
    depth = ("score", "candidate", "more", "direction")
    some = {name: getattr(case, name)[:, :2].contiguous() for name in depth}
    some |= {name: getattr(case, name)[:2] for name in ("a", "c", "weight")}
    assert torch.equal(replace(case, **some).run(device), whole[:, :2])


def test_empty(device, rng):
    case = random_case(2, 3, 4, 9, 2, torch.float32, rng)
    none = {name: getattr(case, name)[:0] for name in ("a", "c", "weight")}
    for name in ("score", "candidate", "more", "direction"):
        none[name] = getattr(case, name)[:, :0].contiguous()
    assert replace(case, **none).run(device).shape == (2, 0, 4, 4)


def test_registration(device, rng):
    for R in (0, 3):
        case = random_case(2, 3, 4, 9, R, torch.bfloat16, rng)
        opcheck(torch.ops.kdtree.edge_scores, tuple(case.args(device)))


def test_rejects_bad_arguments(device, rng):
    case = random_case(2, 3, 4, 9, 2, torch.float32, rng)

    def refuses(message, **changed):
        with says(RuntimeError, message):
            replace(case, **changed).run(device)

    refuses("score has shape [3, 4], wants 3 dimensions", score=case.score[0])
    refuses("score has dtype Double, wants Float", score=case.score.double())
    wide = torch.zeros(2, 3, 65)
    refuses("score has width 65, wants at most 64", score=wide, candidate=wide.long())
    refuses("candidate has dtype Int, wants Long", candidate=case.candidate.int())
    refuses("token has shape [1, 8], wants [2, 8]", token=case.token[:1])
    refuses("length has dtype Long, wants Int", length=case.length.long())
    refuses("temperature has shape [1], wants [2]", temperature=case.temperature[:1])
    refuses("a has shape [2], wants [3]", a=case.a[:2])
    refuses("c has dtype Double, wants Float", c=case.c.double())
    refuses("more has shape [2, 3, 4, 3], wants [2, 3, 4, 4]", more=case.more[..., :3])
    refuses("come together or not at all", before=None)
    refuses("direction has shape [2, 3, 1], wants [2, 3, 2]", direction=case.direction[..., :1])
    refuses("before has dtype Double, wants Float or BFloat16", before=case.before.double(),
            after=case.after.double())  # fmt: skip
    refuses("after has shape [8, 2], wants [9, 2]", after=case.after[:8])
