"""Finds NaN and infinity in bytes as they arrive.

Seen as integers, the numbers that are not finite are the largest of each sign: two maxima tell.
"""

import numpy as np
import torch

# As signed integers: the least of the positive ones that are not finite. With the sign's bit set
# it is, as an unsigned integer, the least of the negative ones.
_LEAST = {
    torch.float32: (np.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float8_e4m3fn: (np.int8, np.uint8, 0x7F),
}


def is_finite(data: np.ndarray, dtype: torch.dtype) -> bool:
    """data: bytes of whole numbers of this dtype, one or more; integers always are finite"""
    if dtype not in _LEAST:
        return True
    signed, unsigned, least = _LEAST[dtype]
    negative = least | 1 << 8 * signed().itemsize - 1
    return data.view(signed).max() < least and data.view(unsigned).max() < negative
