"""The counter-based noise of sampling: Philox4x32-10 and the Gumbel noise made of it.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import numpy as np

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """counter: [n, 4] integers below 2^32; returns [n, 4] uint32."""
    a, b, c, d = (np.asarray(counter, np.uint64)[:, i] for i in range(4))
    for r in range(ROUNDS):
        k0, k1 = (np.uint64((key[i] + r * KEY_STEPS[i]) & 0xFFFFFFFF) for i in range(2))
        p0, p1 = np.uint64(MULTIPLIERS[0]) * a, np.uint64(MULTIPLIERS[1]) * c
        a, b, c, d = (
            (p1 >> np.uint64(32)) ^ b ^ k0,
            p1 & LOW,
            (p0 >> np.uint64(32)) ^ d ^ k1,
            p0 & LOW,
        )
    return np.stack([a, b, c, d], 1).astype(np.uint32)


def uniform(seed: int, position: int, vocab: int) -> np.ndarray:
    """u in (0, 1) of each token id drawn at an absolute position, exact in float32: [vocab]."""
    counter = np.zeros(((vocab + 3) // 4, 4), np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1], counter[:, 2] = position & 0xFFFFFFFF, position >> 32
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab]
    return ((words >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel(seed: int, position: int, vocab: int) -> np.ndarray:
    return -np.log(-np.log(uniform(seed, position, vocab)))
