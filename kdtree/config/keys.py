"""The keys of a config file: each read once by name, checked, and what is unread refused."""

from collections.abc import Mapping
from typing import TypeVar

from kdtree.errors import ConfigError

T = TypeVar("T")
LARGEST = 1 << 24  # of a dimension or a number of positions; no model comes near it


class Keys:
    """The keys of an object in a config file. A key whose value is null is as good as absent.

    ignored: keys that change nothing here. Everything raises ConfigError.
    """

    def __init__(self, values: dict, ignored: frozenset[str] = frozenset()):
        self.values = dict(values)
        self.read = set(ignored)

    def take(self, name: str, *default):
        self.read.add(name)
        if self.values.get(name) is not None:
            return self.values[name]
        if default:
            return default[0]
        raise ConfigError(f"config.json has no {name!r}")

    def stated(self, name: str) -> None:
        """Refuses a config without the key: null says something here, its absence does not."""
        if name not in self.values:
            raise ConfigError(f"config.json has no {name!r}, not even null")

    def architecture(self, supported: tuple[str, ...]) -> None:
        """Refuses a config that names other classes than these."""
        named = self.take("architectures", [])
        if not isinstance(named, list) or not set(map(str, named)) <= set(supported):
            raise ConfigError(f"architectures is {named!r}, supported: {', '.join(supported)}")

    def whole(self, name: str, *default, least: int = 1, most: int = LARGEST) -> int:
        """An integer within bounds, or a default."""
        value = self.take(name, *default)
        if default and value is default[0]:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}, wants an integer of at least {least}")
        if value > most:
            raise ConfigError(f"{name} is {float(min(value, 10**300)):.6g}, wants at most {most}")
        return value

    def real(self, name: str, *default, least: float = 0.0) -> float:
        """A finite number above least, or a default."""
        value = self.take(name, *default)
        if default and value is default[0]:
            return float(value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least < value < 1e30:
            raise ConfigError(f"{name} is {value!r:.40}, wants a finite number above {least}")
        return float(value)

    def mapping(self, name: str) -> dict:
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is {value!r}, wants an object")
        return value

    def one_of(self, name: str, options: tuple, *default):
        """One of the options, and of their type: 1 is not True."""
        value = self.take(name, *default)
        if not any(value == option and type(value) is type(option) for option in options):
            raise ConfigError(f"{name} is {value!r}, supported: {', '.join(map(repr, options))}")
        return value

    def refuse_unread(self, where: str) -> None:
        given = {name for name, value in self.values.items() if value is not None}
        if unread := sorted(given - self.read):
            raise ConfigError(f"{where} has unsupported keys: {', '.join(unread)}")


def agreed(values: Mapping[str, T | None]) -> T | None:
    """The value that these keys share; ConfigError, with both values, where two differ."""
    given = [(name, value) for name, value in values.items() if value is not None]
    for name, value in given[1:]:
        first, wants = given[0]
        if value != wants:
            raise ConfigError(f"{name} is {value!r} where {first} is {wants!r}")
    return given[0][1] if given else None
