"""The sampler's noise in torch: Philox4x32-10, the Gumbel noise made of it, and a draw.

The same words as the package's own sampler draws, so that text written here has the noise that a
drafter will know when it drafts. Unsigned 32-bit words lie in int64, whose products wrap.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LOW = 0xFFFFFFFF


def words(seed: Tensor, position: Tensor, count: int) -> list[Tensor]:
    """The four words of counters 0 to count - 1; seed, position [B] int64; each [B, count]."""
    seed, position = seed[:, None], position[:, None]
    key = [seed & LOW, (seed >> 32) & LOW]
    a = torch.arange(count, device=seed.device).expand(len(seed), count)
    b, c, d = position & LOW, (position >> 32) & LOW, torch.zeros_like(seed)
    for _ in range(ROUNDS):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            ((q >> 32) & LOW) ^ b ^ key[0],
            q & LOW,
            ((p >> 32) & LOW) ^ d ^ key[1],
            p & LOW,
        )
        key = [(k + step) & LOW for k, step in zip(key, KEY_STEPS, strict=True)]
    return [x.expand(len(seed), count) for x in (a, b, c, d)]


def noise(word: Tensor) -> Tensor:
    """Gumbel noise, float32, of 32-bit words."""
    u = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """The noise of every token id at a position; seed, position [B]; [B, vocab] float32."""
    return torch.stack([noise(x) for x in words(seed, position, -(-vocab // 4))], -1).flatten(1)[
        :, :vocab
    ]


def draw(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """The token that the sampler draws: argmax of logit / T + noise, of the logit at T = 0.

    logits [B, W] float32, W a multiple of 4; temperature, seed, position [B]; returns [B] int64.
    """
    warm = (temperature > 0)[:, None]
    scaled = logits / torch.where(warm, temperature[:, None], 1.0)
    best, token = [], []
    for k, word in enumerate(words(seed, position, logits.shape[1] // 4)):
        score = scaled[:, k::4] + torch.where(warm, noise(word), 0.0)
        best.append(score.amax(1))
        token.append(score.argmax(1) * 4 + k)
    best, token = torch.stack(best, 1), torch.stack(token, 1)
    last = logits.shape[1]
    return torch.where(best == best.amax(1, keepdim=True), token, last).amin(1)
