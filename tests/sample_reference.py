"""The sampling contract in numpy, one row at a time, and its comparison with ops.sample."""

import numpy as np
import torch
from tolerance import assert_close

from kdtree import ops

F32 = np.float32
MARGIN = 1e-5  # of a best score over the second: far above float32 noise, which is below 20


def philox(counter, key):
    """Philox4x32-10: counter, four words or arrays of words; key, two words."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    high, low = np.uint64(32), np.uint64(2**32 - 1)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (b >> high) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> high) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def gumbel_ref(W, seed, position):
    """Noise of ids 0 .. W - 1 for the token drawn at position, float64."""
    seed, v = int(seed) % 2**64, np.arange(W)
    zero = np.zeros(W, dtype=np.uint64)
    counter = (v // 4, zero + np.uint64(position % 2**32), zero + np.uint64(position >> 32), zero)
    words = np.stack(philox(counter, (seed % 2**32, seed >> 32)))[v % 4, v]
    return -np.log(-np.log(((words >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23))


def kept_ref(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """The ids that the filters keep, best first."""
    scaled = (logits / F32(temperature)).astype(np.float64)
    ids = np.argsort(-scaled, kind="stable")
    if 0 < top_k < len(ids):
        ids = ids[:top_k]
    p = np.exp(scaled[ids] - scaled[ids[0]])
    if top_p < 1:
        ids = ids[: 1 + np.searchsorted(np.cumsum(p), float(F32(top_p)) * p.sum() * (1 - 1e-9))]
    return ids[p[: len(ids)] >= float(F32(min_p)) * (1 - 1e-6)]


def token_ref(logits, position, seed, temperature, *filters):
    """The drawn token, and by how much its score leads."""
    if temperature == 0:
        return int(np.argmax(logits)), np.inf
    ids = np.sort(kept_ref(logits, temperature, *filters))
    scaled = (logits / F32(temperature)).astype(np.float64)
    score = scaled[ids] + gumbel_ref(len(logits), seed, position + 1)[ids]
    best = int(np.argmax(score))
    lead = score[best] - np.delete(score, best).max(initial=-np.inf)
    return int(ids[best]), lead


def logprob_ref(logits, token):
    x = logits.astype(np.float64)
    log_sum = np.log(np.exp(x - x.max()).sum())
    return x[token] - x.max() - log_sum, 1 + abs(x[token] - x.max()) + log_sum


def run(logits, position, device, seed=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Scalars stand for every sequence."""
    B = logits.shape[0]

    def each(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(B).contiguous().to(device)

    return ops.sample(
        logits.to(device),
        torch.as_tensor(position, dtype=torch.int32)
        .expand(logits.shape[:2])
        .contiguous()
        .to(device),
        each(seed, torch.int64),
        each(temperature, torch.float32),
        each(top_k, torch.int32),
        each(top_p, torch.float32),
        each(min_p, torch.float32),
    )


def check(logits, position, device, seed, temperature, *filters):
    """Tokens against the reference, where its choice leads clearly, and log-probabilities."""
    token, logprob, finite = (
        x.cpu() for x in run(logits, position, device, seed, temperature, *filters)
    )
    assert finite.all()
    B, N, _ = logits.shape
    position = torch.as_tensor(position).expand(B, N)
    clear, want, scale = 0, np.zeros((B, N)), np.ones((B, N))
    for b in range(B):
        args = [x if np.ndim(x) == 0 else x[b] for x in (seed, temperature, *filters)]
        for n in range(N):
            row = logits[b, n].numpy()
            chosen, lead = token_ref(row, int(position[b, n]), *args)
            if lead > MARGIN * (1 + np.abs(row[chosen] / max(args[1], 1e-30))):
                assert token[b, n] == chosen, f"sequence {b} row {n}"
                clear += 1
            want[b, n], scale[b, n] = logprob_ref(row, int(token[b, n]))
    assert clear >= 0.9 * B * N
    assert_close("sample", logprob, want, scale)
    return token
