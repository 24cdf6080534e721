import math

import pytest
import torch
from torch.library import opcheck

from kdtree import ops

LAW = math.log(0.5), math.log(0.8), math.log(0.7)  # of a match's first token, each later one, rank


def matches_ref(history, length, longest, matches, depth):
    """Tokens [B, M, J] after the best matches, and which of them are known."""
    index = torch.arange(history.shape[1], device=history.device)
    last = (length - 1)[:, None]
    same = torch.ones_like(history, dtype=torch.bool)
    matched = torch.zeros_like(history)  # tokens that agree, backwards from each index
    for back in range(longest):
        token = history.gather(1, (last - back).clamp(min=0).long())
        same = same & (history.roll(back, 1) == token) & (index >= back) & (last >= back)
        matched += same
    earlier = (matched > 0) & (index < last)
    key = torch.where(earlier, matched * history.shape[1] + index, -1)
    if key.shape[1] < matches:
        key = torch.nn.functional.pad(key, (0, matches - key.shape[1]), value=-1)
    key, end = key.topk(matches, dim=1)
    follow = end[..., None] + 1 + torch.arange(depth, device=history.device)
    known = (follow <= last[..., None]) & (key >= 0)[..., None]
    follow = follow.clamp(max=history.shape[1] - 1)
    return history.gather(1, follow.flatten(1)).view(follow.shape), known


def edges_ref(candidate, known, first, next, rank):
    """Scores [B, J, M, M]: a node of the tree is the first match that has its prefix."""
    M, J = candidate.shape[1:]
    place = torch.arange(M, device=candidate.device)
    alike = (candidate[:, :, None] == candidate[:, None]) & known[:, :, None] & known[:, None]
    alike = alike.long().cumprod(-1).bool()  # [B, m, m', J]: same prefix up to this depth
    earlier = (place[:, None] > place)[..., None]
    own = ~(alike & earlier).any(2) & known  # [B, m, J]
    owner = torch.where(alike, 1, 0).argmax(2)  # [B, m, J]: the first match alike
    score = torch.full_like(alike, -math.inf, dtype=torch.float32).permute(0, 3, 1, 2)
    score = score.contiguous()
    score[:, 0, 0] = torch.where(own[..., 0], first + rank * place.float(), -math.inf)
    for j in range(1, J):
        entry = torch.full_like(score[:, j, 0], next).masked_fill(~own[..., j], -math.inf)
        score[:, j].scatter_(1, owner[..., j - 1][:, None], entry[:, None])
    return score


def check(history, length, longest, matches, depth):
    """Every bit of the scores; every token that a score is for."""
    candidate, score = ops.ngram_match(history, length, longest, matches, depth, *LAW)
    want, known = matches_ref(history, length, longest, matches, depth)
    want = torch.where(known, want, 0)
    assert torch.equal(candidate, want.transpose(1, 2))
    assert torch.equal(score, edges_ref(want, known, *LAW))
    return candidate, score


def texts(words, lengths, X, rng, device):
    """Random texts, and beyond their ends what goes on like them and must not be read."""
    token = torch.randint(words, (len(lengths), X), generator=rng)
    return token.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "longest, matches, depth", [(1, 1, 1), (3, 4, 7), (5, 33, 15), (64, 64, 2)]
)
@pytest.mark.parametrize("words", [1, 2, 4, 50])
def test_matches_reference(longest, matches, depth, words, device, rng):
    lengths = [1, 2, 3, 5, 17, 64, 65, 200, 299, 300]
    check(*texts(words, lengths, 300, rng, device), longest, matches, depth)


@pytest.mark.parametrize(
    "X, lengths", [(7000, [6999, 4097, 300]), (40000, [40000, 16385, 33, 9000])]
)
@pytest.mark.parametrize("words", [1, 3, 300])
def test_long_texts(X, lengths, words, device, rng):
    """Many tiles and blocks, of which the best matches may be anywhere."""
    args = texts(words, lengths, X, rng, device)
    check(*args, 6, 4, 7)
    check(*args, 4, 64, 3)


@pytest.mark.parametrize("at", [0, 5, 255, 256, 20000, 39990])
def test_one_match_far_off(at, device):
    """Wherever it is, and with its first tokens cut off where a text begins or not."""
    token = torch.arange(1, 40017, device=device)[None]
    token[0, at : at + 3], token[0, 39997:40000] = 7, 7
    length = torch.tensor([40000], dtype=torch.int32, device=device)
    candidate, score = check(token, length, 3, 4, 7)
    assert candidate[0, 0, 0] == token[0, at + 3] and score[0, 0, 0, 0] > -1


def test_by_hand(device):
    """The latest of the two that match twice, then the earlier, which begins alike; then one that
    matches once."""
    text = [1, 2, 3, 4, 1, 2, 3, 5, 9, 2, 6, 1, 2]
    token = torch.tensor([[*text, 1, 2]], device=device)
    length = torch.tensor([len(text)], dtype=torch.int32, device=device)
    candidate, score = ops.ngram_match(token, length, 2, 4, 2, -1.0, -2.0, -3.0)
    assert candidate[0].tolist() == [[3, 3, 6, 0], [5, 4, 1, 0]]
    never = [-math.inf] * 4
    assert score[0, 0].tolist() == [[-1, -math.inf, -7, -math.inf], never, never, never]
    second = [[-2, -2, -math.inf, -math.inf], never, [-math.inf, -math.inf, -2, -math.inf], never]
    assert score[0, 1].tolist() == second


def test_lengths_out_of_range_are_taken_as_the_nearest(device, rng):
    token, _ = texts(2, [0, 0], 30, rng, device)
    wild, near = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([-5, 99], [1, 30]))
    got, want = ops.ngram_match(token, wild, 3, 4, 7, *LAW), check(token, near, 3, 4, 7)
    assert all(map(torch.equal, got, want))


def test_sequences_are_independent(device, rng):
    token, length = texts(3, [50, 1, 29000, 20000], 30000, rng, device)
    whole = ops.ngram_match(token, length, 3, 4, 7, *LAW)
    for b in range(4):
        alone = ops.ngram_match(token[b : b + 1], length[b : b + 1], 3, 4, 7, *LAW)
        short = token[b : b + 1, : int(length[b])].contiguous()
        shorter = ops.ngram_match(short, length[b : b + 1], 3, 4, 7, *LAW)
        for got in (alone, shorter):
            assert all(torch.equal(x[0], y[b]) for x, y in zip(got, whole, strict=True))


def test_no_sequences(device, rng):
    token, length = texts(3, [5], 9, rng, device)
    got = ops.ngram_match(token[:0], length[:0], 3, 4, 7, *LAW)
    assert [x.shape for x in got] == [(0, 7, 4), (0, 7, 4, 4)]


def test_registration(device, rng):
    opcheck(torch.ops.kdtree.ngram_match, (*texts(3, [5, 9], 9, rng, device), 3, 4, 7, *LAW))


def test_rejects_bad_arguments(device, rng):
    token, length = texts(3, [5, 9], 9, rng, device)
    with pytest.raises(RuntimeError, match="token has dtype Int, wants Long"):
        ops.ngram_match(token.int(), length, 3, 4, 7, *LAW)
    with pytest.raises(RuntimeError, match="token has room for none"):
        ops.ngram_match(token[:, :0], length, 3, 4, 7, *LAW)
    with pytest.raises(RuntimeError, match=r"length has shape \[1\], wants \[2\]"):
        ops.ngram_match(token, length[:1], 3, 4, 7, *LAW)
    with pytest.raises(RuntimeError, match="longest is 65, wants 1 to 64"):
        ops.ngram_match(token, length, 65, 4, 7, *LAW)
    with pytest.raises(RuntimeError, match="matches is 0, wants 1 to 64"):
        ops.ngram_match(token, length, 3, 0, 7, *LAW)
    with pytest.raises(RuntimeError, match="depth is 16, wants 1 to 15"):
        ops.ngram_match(token, length, 3, 4, 16, *LAW)
