"""Checks of single values that callers give: the name, the value and what is wanted."""

from collections.abc import Callable

FLOAT_MAX = 3.4028234663852886e38  # of float32
LONG = 80  # characters of a value in a message


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """The value in a message: cut where it is long, of a huge integer its size alone."""
    if is_whole(value) and value.bit_length() > 256:  # Python prints none of thousands of digits
        return f"about {'-' * (value < 0)}2^{value.bit_length() - 1}"
    text = repr(value)
    return text if len(text) <= LONG else f"{text[:LONG]}... ({len(text)} characters)"


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Raises TypeError where value is no integer, ValueError where it is out of range."""
    if not is_whole(value):
        raise TypeError(f"{name} is {shown(value)}, wants an integer")
    if value < least or (most is not None and value > most):
        wants = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} is {shown(value)}, wants {wants}")
    return value


def real(name: str, value: object, wants: str, ok: Callable[[float], bool]) -> float:
    """Raises TypeError where value is no number, ValueError where float32 or ok refuses it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}, wants a number")
    if not abs(value) <= FLOAT_MAX or not ok(value):  # a NaN is not within the bound either
        raise ValueError(f"{name} is {shown(value)}, wants a finite number {wants}")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Raises TypeError where value is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}, wants True or False")
    return value
