"""Random weights for measurements: what a model's constructor takes, made instead of loaded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kdtree.weights.formats import GROUP

CODE = 4.637  # root mean square of the codes -8 .. 7
BIAS = 0.01  # of the choice of experts, far below the spread of scores


class RandomWeights:
    """Takes the place of Weights. The numbers follow from the seed and the order of taking.

    Matrices have deviation I^-0.5, so that a product keeps the size of its input; embeddings have
    deviation 1, so that rows differ from each other and choose different experts. The codes of INT4
    matrices are uniform words, drawn on the device; their mean is -1/2, and scales of either sign
    keep that from adding up to what all rows have in common.
    device: "meta" to learn what the model takes without memory; quantize: "int4" for routed experts
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, quantize: str | None, seed: int = 0
    ):
        self.device, self.dtype, self.quantize = torch.device(device), dtype, quantize
        self.random = None
        if self.device.type != "meta":
            self.random = torch.Generator(self.device).manual_seed(seed)

    def at(self, name: object) -> "RandomWeights":
        return self

    def has(self, name: str) -> bool:
        return False  # no tensor but those that the config asks for

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.dtype
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device, dtype=dtype)
        deviation = BIAS if len(shape) == 1 else shape[-1] ** -0.5
        return self._normal(shape, deviation, dtype)

    def take_matrix(self, name: str, *shape: int) -> Tensor:
        deviation = 1.0 if name == "embed_tokens.weight" else shape[-1] ** -0.5
        return self._normal(shape, deviation, self.dtype)

    def take_bank(self, names: Sequence[str], *shape: int) -> Tensor:
        return self._normal((len(names), *shape), shape[-1] ** -0.5, self.dtype)

    def take_int4_bank(
        self, names: Sequence[str], out: int, features: int
    ) -> tuple[Tensor, Tensor]:
        """As Weights.take_int4_bank, but that scales have either sign."""
        if out % GROUP or features % GROUP:
            raise ValueError(f"experts are {out} x {features}, INT4 wants multiples of {GROUP}")
        tiles = (len(names), out // GROUP, features // GROUP)
        codes = torch.empty((*tiles, 128), device=self.device, dtype=torch.int32)
        scale = torch.empty((*tiles, GROUP), device=self.device, dtype=self.dtype)
        if self.random:
            codes.random_(-(2**31), 2**31, generator=self.random)
            scale.normal_(0, features**-0.5 / CODE, generator=self.random)
        return codes, scale

    def _normal(self, shape: tuple[int, ...], deviation: float, dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, device=self.device, dtype=dtype)
        return made.normal_(0, deviation, generator=self.random) if self.random else made
