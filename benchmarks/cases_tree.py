"""Draft trees: candidates, the tree, the draws, the walk."""

from collections.abc import Iterator
from functools import partial

import eager
import torch
from cases import Bench, Case

from kdtree import ops


def top_logprobs(b: Bench) -> Iterator[Case]:
    for T in (1, 15):
        logits = b.rand(T, b.size.W, dtype=torch.float32)
        run, plain = partial(ops.top_logprobs, logits, 16), partial(eager.top_logprobs, logits, 16)
        b.close("top_logprobs", run()[0], plain()[0])
        assert torch.equal(run()[1], plain()[1]), "top_logprobs: other ids"
        yield Case({"T": T, "W": b.size.W, "k": 16}, run, 4 * T * b.size.W, 0, ("eager", plain))


def draft_logits(b: Bench) -> Iterator[Case]:
    W = b.size.W
    for J, temperature in ((7, 0.0), (7, 1.0), (15, 1.0)):
        logits = b.rand(1, J, W, scale=3, dtype=torch.float32)
        where = b.tensor([9]), b.tensor([7], torch.int64), b.tensor([temperature], torch.float32)
        fitted = [torch.full((J,), value, device=b.device) for value in (1.2, 0.9, 0.1)]
        run = partial(ops.draft_logits, logits, *where, *fitted)
        plain = partial(eager.draft_logits, logits, temperature, *(f[:, None] for f in fitted))
        if temperature:
            want = ops.draft_logits(*(each.cpu() for each in (logits, *where, *fitted)))
            b.close("draft_logits", run().cpu(), want)
        else:
            b.close("draft_logits", run(), plain())
        shape = {"B": 1, "J": J, "W": W, "temperature": temperature}
        yield Case(shape, run, 8 * J * W, 0, ("eager, other noise", plain))


def tree_build(b: Bench) -> Iterator[Case]:
    for N, J, M, edges in ((8, 7, 16, 0), (64, 15, 16, 0), (16, 7, 16, 1), (64, 7, 16, 1)):
        lists = (1, J, M, M) if edges else (1, J, M)
        score = b.rand(*lists, scale=3, dtype=torch.float32).log_softmax(-1)
        candidate = b.ints(1, J, M, high=b.size.W, dtype=torch.int64)
        operands = score, candidate, b.tensor([1], torch.int64), N - 1
        run, plain = partial(ops.tree_build, *operands), partial(eager.tree_build, *operands)
        got = run()
        assert [got[0][0].tolist(), got[1][0].tolist()] == [*plain()], "tree_build: another tree"
        moved = score.nbytes + candidate.nbytes + N * 28
        shape = {"B": 1, "N": N, "J": J, "M": M} | ({"edges": 1} if edges else {})
        yield Case(shape, run, moved, 0, ("heap in Python", plain), on_host=True)


def sample(b: Bench) -> Iterator[Case]:
    W = b.size.W
    for N, temperature, top_p in ((1, 0.0, 1.0), (16, 0.0, 1.0), (16, 1.0, 1.0), (16, 1.0, 0.95)):
        logits = b.rand(1, N, W, scale=3, dtype=torch.float32)
        settings = [
            b.tensor([[*range(N)]]),
            b.tensor([7], torch.int64),
            b.tensor([temperature], torch.float32),
            b.tensor([0]),
            b.tensor([top_p], torch.float32),
            b.tensor([0.0], torch.float32),
        ]  # position, seed, temperature, top_k, top_p, min_p
        operands = logits, *settings
        run, plain = partial(ops.sample, *operands), partial(eager.argmax, logits)
        token = run()[0].cpu()
        want = ops.sample(*(each.cpu() for each in operands))[0] if temperature else plain()[0]
        assert torch.equal(token, want.cpu()), "sample: other tokens"
        shape = {"B": 1, "N": N, "W": W, "temperature": temperature, "top_p": top_p}
        yield Case(shape, run, 4 * N * W, 0, ("eager argmax", plain))


def tree_accept(b: Bench) -> Iterator[Case]:
    for N in (8, 64):
        token = b.ints(1, N, high=3, dtype=torch.int64)
        parent = b.tensor([[-1, *((n - 1) // 2 for n in range(1, N))]])
        target = b.ints(1, N, high=3, dtype=torch.int64)
        finite = torch.ones(1, N, dtype=torch.bool, device=b.device)
        logprob = b.rand(1, N, dtype=torch.float32)
        run = partial(ops.tree_accept, token, parent, target, finite, logprob)
        plain = partial(eager.tree_accept, token, parent, target)
        path, length, *_ = run()
        assert path[0, : int(length)].tolist() == plain(), "tree_accept: another path"
        moved = N * 25
        yield Case({"B": 1, "N": N}, run, moved, 0, ("walk in Python", plain), on_host=True)


def tree_choose(b: Bench) -> Iterator[Case]:
    for N in (8, 64):
        score = b.rand(1, 15, 16, scale=3, dtype=torch.float32).log_softmax(-1)
        candidate = b.ints(1, 15, 16, high=b.size.W, dtype=torch.int64)
        tree = ops.tree_build(score, candidate, b.tensor([1], torch.int64), N - 1, False)
        sizes = [n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if n <= N]
        seconds = b.tensor([1 + 0.02 * n for n in sizes], torch.float32)
        factor = torch.full((15, 3), 0.9, device=b.device)
        operands = tree[1], tree[2], tree[4], factor, b.tensor(sizes), seconds
        run, plain = partial(ops.tree_choose, *operands), partial(eager.tree_choose, *operands)
        assert int(run()[0]) == plain(), "tree_choose: another size"
        yield Case({"B": 1, "N": N}, run, N * 16, 0, ("loops in Python", plain), on_host=True)


def clock(b: Bench) -> Iterator[Case]:
    times = torch.zeros(5, dtype=torch.int64, device=b.device)
    yield Case({}, partial(ops.clock, times, 0), 8, 0, ("fill", partial(times[:1].fill_, 1)))
