"""DFlash2's convolutions: each channel of a slot takes in a little of the slots before it.

    out[i, c] = sum over t of (base[t, c] + dynamic[i, t, c / group]) * x[i - t, c]

before a sublayer and after it, by two kernels; both dynamic parts come from what goes in first.
Source: https://inco.ai/blog/dflash2.
"""

from collections.abc import Callable

from torch import Tensor, nn

from kdtree import ops
from kdtree.drafters.dflash.config import Convolution
from kdtree.layers import Linear
from kdtree.layers.linear import frozen
from kdtree.weights import Weights


class BlockConv(nn.Module):
    """The two kernels of one sublayer. base_kernel: [2, taps, D]"""

    def __init__(self, config: Convolution, hidden: int, block: int, w: Weights):
        super().__init__()
        self.config, self.block = config, block
        taps, groups = config.taps, hidden // config.group
        self.base_kernel = frozen(w.take("base_kernel", 2, taps, hidden))
        projection = w.take_matrix("kernel_projection.weight", 2 * taps * groups, hidden)
        self.kernel_projection = Linear(projection)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """sublayer(x) between the two convolutions; x: [B * block, D]"""
        dynamic = self.kernel_projection(x).unflatten(1, (2, self.config.taps, -1))
        before, after = self.base_kernel
        y = sublayer(ops.block_conv(x, dynamic[:, 0], before, self.block))
        return ops.block_conv(y, dynamic[:, 1], after, self.block)
