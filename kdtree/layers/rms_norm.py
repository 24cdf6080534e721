"""Root-mean-square norm."""

from torch import Tensor, nn

from kdtree import ops
from kdtree.layers.linear import frozen


class RmsNorm(nn.Module):
    """The norm of a stream, or of a stream to which something is added first."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight = frozen(weight)
        self.eps = eps

    def forward(self, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The norm and the stream it was taken of: x, or x + stream. x, stream: [T, D]"""
        if stream is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, stream, self.weight, self.eps)
