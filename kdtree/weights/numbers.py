"""Judges stored numbers in bytes as they arrive.

Seen as integers, the numbers of one sign are in the order of their magnitudes: extremes tell.
"""

from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np
import torch

NOT_FINITE = "is not finite"
NOT_POSITIVE = "holds a scale of 0 or less"
# Integers as wide as the numbers, and the least of them, without a sign, that is no finite number.
_INTEGERS = {
    torch.float32: (np.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
}


class Rule(NamedTuple):
    """What floating-point numbers must be beside finite. most: their magnitude at most"""

    most: float = inf
    positive: bool = False


def fault(data: np.ndarray, dtype: torch.dtype, rule: Rule) -> str | None:
    """What is wrong with them. data: bytes of whole numbers of this dtype, one or more

    Integers always are right.
    """
    if dtype not in _INTEGERS:
        return None
    signed, unsigned, infinite = _INTEGERS[dtype]
    signed, unsigned = data.view(signed), data.view(unsigned)
    sign = 1 << 8 * signed.itemsize - 1
    positive, negative = signed.max(), unsigned.max()
    most = _bits(dtype, rule.most)
    if positive > most or negative > most | sign:
        if positive >= infinite or negative >= infinite | sign:
            return NOT_FINITE
        return f"holds a number beyond {rule.most:.4g}, the most that the model's dtype can take"
    return NOT_POSITIVE if rule.positive and signed.min() <= 0 else None


@cache
def _bits(dtype: torch.dtype, most: float) -> int:
    """The largest finite number of the dtype that is no larger than most, as an integer."""
    nearest = torch.tensor([min(most, torch.finfo(dtype).max)], dtype=torch.float64).to(dtype)
    bits = int(nearest.view(torch.uint8).numpy().view(_INTEGERS[dtype][0])[0])
    return bits - (nearest.item() > most)
