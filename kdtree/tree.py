"""Draft trees and accepted paths: plain tensors on the device, no policy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree import ops

MAX_NODES = 64  # a node's ancestors are one 64-bit word
MAX_DEPTH = 15  # a row's ancestors lie among its last 16 keys, which attention takes one by one


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A draft tree per sequence, its nodes in topological order.

    token: [B, N] int64; token[:, 0] is the last committed token, the root; 0 at padding
    parent: [B, N] int32; -1 at the root, -2 at padding, else parent[b, n] < n
    depth: [B, N] int32; 0 at the root and at padding
    ancestors: [B, N] int64, bit m set for node m an ancestor or self, 0 at padding; None for a
        chain without padding, of any length
    score: [B, N] float32, the path's by the drafter, at most 0: a log-probability, which sharpening
        and coupling (kdtree.drafters.scores) make another number; or None
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    ancestors: Tensor | None
    score: Tensor | None = None

    @staticmethod
    def root(
        token: Tensor, active: Tensor | None = None, length: Tensor | None = None
    ) -> "TokenTree":
        """The tree of one node, which makes a round plain autoregressive decoding.

        token: [B] int64, or with length: [B] int32 the known tokens [B, X]; active: [B] bool
        """
        none = token.new_empty((len(token), 0, 0))
        return TokenTree.build(none.float(), none, token, 0, False, active, length)

    @staticmethod
    def chain(token: Tensor) -> "TokenTree":
        """A chain of known tokens. token: [B, N]"""
        depth = torch.arange(token.shape[1], dtype=torch.int32, device=token.device)
        depth = depth.expand(token.shape).contiguous()
        return TokenTree(token, depth - 1, depth, None)

    @staticmethod
    def build(
        score: Tensor,
        candidate: Tensor,
        root: Tensor,
        budget: int,
        chain_seed: bool,
        active: Tensor | None = None,
        length: Tensor | None = None,
    ) -> "TokenTree":
        """The best-first tree; arguments as in ops.tree_build."""
        each = ops.tree_build(score, candidate, root, budget, chain_seed, active, length)
        return TokenTree(*each)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.token, self.parent, self.depth, self.ancestors, self.score

    def first(self, nodes: int) -> "TokenTree":
        """The tree of the first nodes: of a best-first tree, that of a smaller budget."""
        each = (x if x is None else x.narrow(1, 0, nodes).contiguous() for x in self.tensors)
        return TokenTree(*each)


@dataclass(frozen=True, slots=True)
class Path:
    """What a round accepts of each sequence's tree, and what it emits; J = min(N, 16) here.

    node: [B, J] int32, the nodes walked, root first, -1 from length on
    length: [B] int32, nodes committed and tokens emitted
    token: [B, J] int64, emitted tokens, the target's own draw after each node
    logprob: [B, J] float32, of those, by the raw logits; 0 from length on
    failed: [B] bool, the walk ended at a node whose logits are not finite
    """

    node: Tensor
    length: Tensor
    token: Tensor
    logprob: Tensor
    failed: Tensor

    def best(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best tokens after each node: log-probabilities and ids [B, J, k].

        logits: [B, N, W] float32, of the tree's nodes
        """
        B, J = self.node.shape
        k = min(k, logits.shape[2])
        index = self.node.clamp(min=0).long()[..., None].expand(-1, -1, logits.shape[2])
        found = ops.top_logprobs(logits.gather(1, index).flatten(0, 1), k)
        return found[0].view(B, J, k), found[1].view(B, J, k)
