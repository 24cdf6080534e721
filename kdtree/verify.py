"""What the target says of a tree: its own draw at every node, and the walk that follows it.

Sample-and-walk: every emitted token is the target's own draw, and a child is entered only where it
equals that draw. The noise of a draw is fixed by seed and position, so the tokens are those of
autoregressive decoding whatever the tree holds.
"""

from dataclasses import dataclass

from torch import Tensor

from kdtree import ops
from kdtree.cache import Step
from kdtree.tree import Path, TokenTree


@dataclass(frozen=True, slots=True)
class Sampling:
    """Each sequence's sampling parameters, as in ops.sample.

    seed: [B] int64; temperature, top_p, min_p: [B] float32; top_k: [B] int32
    masked: [B, 64] int64, tokens not to be drawn before masked_until, repeats allowed
    masked_until: [B] int32, the first position where they may be drawn; 0 where all may always
    """

    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    masked: Tensor
    masked_until: Tensor


def verify(
    tree: TokenTree, step: Step, logits: Tensor, sampling: Sampling, any_masked: bool = False
) -> Path:
    """The accepted path of each sequence. logits: [B, N, W] float32

    any_masked: whether some sequence still masks tokens (min_tokens)
    """
    s = sampling
    drawn = _mask(logits, step.position, s) if any_masked else logits
    target, logprob, finite = ops.sample(
        drawn,
        step.position,
        s.seed,
        s.temperature,
        s.top_k,
        s.top_p,
        s.min_p,
        logits if any_masked else None,
    )
    return Path(*ops.tree_accept(tree.token, tree.parent, target, finite, logprob))


def _mask(logits: Tensor, position: Tensor, s: Sampling) -> Tensor:
    """Logits without the masked tokens, where the drawn token stands before masked_until."""
    early = (position + 1 < s.masked_until[:, None])[..., None]
    token = s.masked[:, None, :].expand(*position.shape, -1)
    kept = logits.gather(2, token).masked_fill(early, float("-inf"))
    return logits.scatter(2, token, kept)
