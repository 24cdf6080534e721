import numpy as np
import pytest
import torch
from sample_reference import gumbel_ref
from says import says
from tolerance import assert_close
from torch.library import opcheck

from kdtree import ops

F32 = np.float32


def draft_logits_ref(logits, position, seed, temperature, a, b, c):
    """[B, J, W] and the magnitude of what is summed, float64. Everything is numpy."""
    x = logits.astype(np.float64)
    top = x.max(-1, keepdims=True)
    log_sum = np.log(np.exp(x - top).sum(-1, keepdims=True))
    B, J, W = x.shape
    noise = np.zeros_like(x)
    for i in range(B):
        for j in range(J):
            noise[i, j] = gumbel_ref(W, seed[i], int(position[i]) + 1 + j)
    a, b, c = (v.astype(np.float64)[None, :, None] for v in (a, b, c))
    t = temperature.astype(np.float64)[:, None, None]
    below = 1 + c * t
    draft, noisy = a / below, b * t / below
    want = draft * (x - top - log_sum) + noisy * noise
    scale = np.abs(draft) * (1 + np.abs(x - top) + log_sum) + np.abs(noisy) * (1 + np.abs(noise))
    return want, scale


def operands(rng, B, J, W, spread=3.0):
    """logits and what goes with them; the first sequence is greedy, the second at temperature 1."""
    temperature = torch.rand(B, generator=rng) * 1.5
    temperature[:2] = torch.tensor([0.0, 1.0])[:B]
    return (
        torch.randn(B, J, W, generator=rng) * spread,
        torch.randint(0, 2**31 - 20, (B,), generator=rng, dtype=torch.int32),
        torch.randint(-(2**62), 2**62, (B,), generator=rng),
        temperature,
        1 + torch.rand(J, generator=rng) * 0.4,
        1 - torch.rand(J, generator=rng) * 0.4,
        torch.rand(J, generator=rng) * 0.5 - 0.2,
    )


def run(given, device):
    return ops.draft_logits(*(x.to(device) for x in given))


@pytest.mark.parametrize(
    "B, J, W", [(1, 1, 1), (2, 3, 2), (3, 15, 37), (2, 7, 64), (4, 2, 65), (3, 7, 4099)]
)
def test_matches_float64(B, J, W, device, rng):
    for spread in (0.1, 3, 40):
        given = operands(rng, B, J, W, spread)
        want, scale = draft_logits_ref(*(x.numpy() for x in given))
        assert_close("draft_logits", run(given, device), want, scale)


@pytest.mark.large
def test_matches_float64_at_size(device, rng):
    given = operands(rng, 2, 2, 163840)
    want, scale = draft_logits_ref(*(x.numpy() for x in given))
    assert_close("draft_logits", run(given, device), want, scale)


def test_the_noise_is_that_of_the_draw(device, rng):
    """The drafter that knows the target's logits knows every draw: its best is the token."""
    B, J, W = 4, 9, 3001
    logits, position, seed, temperature, *_ = operands(rng, B, J, W)
    one, nought = torch.ones(J), torch.zeros(J)
    y = run((logits, position, seed, temperature, one, one, nought), device)
    rows = position[:, None] + torch.arange(J, dtype=torch.int32)
    zero = torch.zeros(B, dtype=torch.int32)
    sampling = (seed, temperature, zero, torch.ones(B), torch.zeros(B))
    token, *_ = ops.sample(*(x.to(device) for x in (logits, rows, *sampling)))
    assert torch.equal(y.argmax(-1), token)
    assert not torch.equal(logits[1:].argmax(-1), token[1:].cpu())


def test_without_temperature_or_weight_there_is_no_noise(device, rng):
    logits, position, seed, temperature, a, b, c = operands(rng, 3, 4, 333)
    plain = run((logits, position, seed, temperature * 0, a, b, c), device)
    other = run((logits, position + 1, seed + 1, temperature * 0, a, b * 2, c), device)
    assert torch.equal(plain, other)
    want = a[:, None] * logits.double().log_softmax(-1)
    torch.testing.assert_close(plain.double().cpu(), want, rtol=1e-5, atol=1e-5)
    uncoupled = run((logits, position, seed, temperature, a, b * 0, c * 0), device)
    assert torch.equal(uncoupled, plain)


def test_rows_that_are_not_finite(device, rng):
    """A NaN, a +inf or nothing but -inf spoil their own row; a -inf among others stays."""
    given = operands(rng, 2, 5, 70)
    logits = given[0]
    logits[:, 0, 7], logits[:, 1, 8], logits[:, 2], logits[:, 3, 9] = np.nan, np.inf, -np.inf, 0
    logits[:, 3, 10] = -np.inf
    y = run(given, device)
    assert y[:, :3].isnan().all() and not y[:, 3:].isnan().any()
    assert (y[:, 3, 10] == -np.inf).all() and y[:, 4].isfinite().all()
    for a in (0.0, -1.0):
        logits, *sampling, _, b, c = given
        y = run((logits, *sampling, torch.full((5,), a), b, c), device)
        assert (y[:, 3, 10] == -np.inf).all() and not y[:, 3:].isnan().any()
    score, ids = ops.top_logprobs(y.flatten(0, 1), 5)
    assert score[:3].isnan().all() and ids.min() >= 0 and ids.max() < 70


def test_rows_are_invariant(device, rng):
    """A row has the same bits alone and among others, in another place at the same position."""
    one = operands(rng, 2, 1, 1001)
    want = run(one, device)
    for B in (3, 17, 64):
        many = operands(rng, B, 1, 1001)
        for x, y in zip(many[:4], one[:4], strict=True):
            x[-2:] = y
        many = (*many[:4], *one[4:])
        assert torch.equal(run(many, device)[-2:], want)
    logits, position, *rest = one
    deep = torch.randn(2, 4, 1001, generator=rng)
    deep[:, 3] = logits[:, 0]
    by_depth = [x.expand(4).contiguous() for x in rest[2:]]
    got = run((deep, position - 3, *rest[:2], *by_depth), device)
    assert torch.equal(got[:, 3], want[:, 0])


def test_no_rows(device):
    given = operands(torch.Generator(), 2, 3, 5)
    assert run((given[0][:0], *(x[:0] for x in given[1:4]), *given[4:]), device).shape == (0, 3, 5)
    assert run((given[0][:, :0], *given[1:4], *(x[:0] for x in given[4:])), device).numel() == 0


def test_registration(device, rng):
    given = tuple(x.to(device) for x in operands(rng, 2, 3, 50))
    opcheck(torch.ops.kdtree.draft_logits, given)


def test_rejects_bad_arguments(device, rng):
    given = [x.to(device) for x in operands(rng, 2, 3, 50)]  # a copy elsewhere is contiguous
    names = ("logits", "position", "seed", "temperature", "a", "b", "c")

    def refuses(message, **changed):
        values = dict(zip(names, given, strict=True)) | changed
        with says(RuntimeError, *message):
            run(values.values(), device)

    refuses(["logits has shape [3, 50], wants 3 dimensions"], logits=given[0][0])
    refuses(["logits has dtype Double, wants Float"], logits=given[0].double())
    refuses(["logits must be contiguous"], logits=given[0][..., ::2])
    refuses(["logits has 0 columns, wants 1 to 16777216"], logits=given[0][..., :0].clone())
    refuses(["position has shape [3], wants [2]"], position=torch.zeros(3, dtype=torch.int32))
    refuses(["seed has dtype Int, wants Long"], seed=given[2].int())
    refuses(["temperature has dtype Double, wants Float"], temperature=given[3].double())
    refuses(["a has shape [2], wants [3]"], a=given[4][:2])
    refuses(["b has dtype Double, wants Float"], b=given[5].double())
    refuses(["c has shape [1, 3], wants [3]"], c=given[6][None])
