"""The optimiser of matrices: momentum, orthogonalised."""

import torch
from torch import Tensor


def orthogonal(m: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix of each of m [N, out, in], roughly (Newton-Schulz)."""
    x = m.bfloat16() if m.is_cuda else m
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalised, for stacks of matrices; the step's size is as AdamW's."""

    def __init__(self, tensors: list[Tensor], matrices: list[tuple[int, int]]) -> None:
        self.tensors, self.matrices = tensors, matrices
        self.momentum = [torch.zeros_like(x) for x in tensors]

    @torch.no_grad()
    def step(self, grads: list[Tensor], lr: float, decay: float) -> None:
        torch._foreach_lerp_(self.momentum, [g.float() for g in grads], 0.05)
        for x, (out, inside), m, g in zip(
            self.tensors, self.matrices, self.momentum, grads, strict=True
        ):
            update = orthogonal(torch.lerp(g.float(), m, 0.95).view(-1, out, inside)).view_as(x)
            x.mul_(1 - lr * decay).add_(update, alpha=-0.2 * max(out, inside) ** 0.5 * lr)
