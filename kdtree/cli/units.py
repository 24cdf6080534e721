"""Quantities with units, read and written. Decimal where not said otherwise: 1 GB is 1e9 bytes."""

import math
import re

from kdtree.checks import shown

_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_FACTORS = {name.lower(): factor for name, factor in (_PREFIXES | _BINARY).items()}


def parse(name: str, text: str, unit: str, example: str) -> float:
    """The value of text in units, "141GB" of unit "B" or "4.42 TB/s" of unit "B/s".

    name, example: for the message of the ValueError where text is no positive quantity of the unit
    """
    match = re.fullmatch(rf"\s*(\d+\.?\d*|\.\d+)\s*([kmgtp]i?)?{unit}\s*", text, re.IGNORECASE)
    value = float(match[1]) * _FACTORS[(match[2] or "").lower()] if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {shown(text)}, wants a quantity such as {example}")
    return value


def show(value: float, unit: str = "", thousand: str = "kMGTP") -> str:
    """Four digits and the prefix that leaves at most three before the point: 70.27 kB."""
    size, prefix = float(value), ""
    for prefix_above in thousand:
        if float(f"{size:.4g}") < 1000:
            break
        size, prefix = size / 1000, prefix_above
    return f"{size:.4g} {prefix}{unit}".rstrip()


def count(value: float) -> str:
    """A number of parameters: 1.026 T, 671 B, 24 M."""
    return show(value, thousand="kMBT")
