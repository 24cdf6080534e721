"""The rotation of mla_query and mla_append, in float64."""

import numpy as np


def rotate_ref(x: np.ndarray, table: np.ndarray, interleaved: bool) -> tuple[np.ndarray, ...]:
    """x: [..., R], table: [..., R]; returns the rotated and the sums of absolute terms."""
    half = x.shape[-1] // 2
    cosine, sine = table[..., :half], table[..., half:]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    want, scale = np.empty_like(x), np.empty_like(x)
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    want[..., first], want[..., second] = a * cosine - b * sine, a * sine + b * cosine
    a, b, cosine, sine = abs(a), abs(b), abs(cosine), abs(sine)
    scale[..., first], scale[..., second] = a * cosine + b * sine, a * sine + b * cosine
    return want, scale
