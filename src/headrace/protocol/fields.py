"""Taking the fields of a JSON object one by one, with errors that name the field, the value and the limit.

``null`` means absent. A boolean is not a number; a float with an integral value (``1.0``) is a legal integer. Whatever
nobody took is unknown, and reported by ``unknown``.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from headrace.base.errors import RequestError
from headrace.protocol.strict_json import shown


class Fields:
    """The fields of one object that a client sent.

    Args:
        values: the decoded object.
        path: where it stands in the body, for messages: ``messages[2].``.
    """

    def __init__(self, values: dict[str, object], path: str = "") -> None:
        self._values = values
        self._path = path
        self._taken: set[str] = set()

    def path_of(self, name: str) -> str:
        """Gives where a field stands in the body."""
        return self._path + name

    def take(self, name: str) -> object:
        """Gives the value, or None where absent or null."""
        self._taken.add(name)
        return self._values.get(name)

    def take_all(self, names: Set[str]) -> dict[str, object]:
        """Gives those of ``names`` that carry a value. Cost: that of the fields that are there."""
        self._taken |= self._values.keys() & names
        return {name: self._values[name] for name in self._values.keys() & names if self._values[name] is not None}

    def wrong(self, name: str, value: object, rule: str, *, code: str | None = None) -> RequestError:
        """Makes the error ``name must … , got …``."""
        return RequestError(
            f"{self._path}{name} must be {rule}, got {shown(value)}", param=self._path + name, code=code
        )

    def missing(self, name: str) -> RequestError:
        """Makes the error for a required field."""
        return RequestError(f"{self._path}{name} is required", param=self._path + name, code="missing_required")

    def number(self, name: str, default: float, low: float, high: float, *, is_low_open: bool = False) -> float:
        """Gives a finite number in [low, high], or in (low, high]."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is int or type(value) is float:
            number = float(value)
            if low <= number <= high and not (is_low_open and number == low):
                return number
        opening = "(" if is_low_open else "["
        raise self.wrong(name, value, f"a number in {opening}{low:g}, {high:g}]")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Gives an integer in [low, high], or None where absent."""
        value = self.take(name)
        if value is None:
            return None
        number = as_integer(value)
        if number is None or not low <= number <= high:
            raise self.wrong(name, value, f"an integer from {low} to {high}")
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """Gives a boolean."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, max_chars: int) -> str | None:
        """Gives a string of at most ``max_chars`` characters, or None where absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        if len(value) > max_chars:
            raise RequestError(
                f"{self._path}{name} has {len(value)} characters, the limit is {max_chars}", param=self._path + name
            )
        return value

    def choice(self, name: str, allowed: Collection[str], rule: str | None = None) -> str | None:
        """Gives one of the allowed strings, or None where absent; ``rule`` says what is allowed in other words."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(name, value, rule or f"one of {', '.join(allowed)}")
        return value

    def items(self, name: str, max_items: int) -> list[object] | None:
        """Gives a list of at most ``max_items`` values, or None where absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        if len(value) > max_items:
            raise RequestError(
                f"{self._path}{name} has {len(value)} entries, the limit is {max_items}", param=self._path + name
            )
        return value

    def mapping(self, name: str) -> dict[str, object] | None:
        """Gives an object, or None where absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def unknown(self) -> tuple[str, ...]:
        """Gives the names that nobody took and that carry a value, in the order of the body."""
        return tuple(
            self._path + name for name, value in self._values.items() if name not in self._taken and value is not None
        )


def as_integer(value: object) -> int | None:
    """Gives ``value`` as an integer where it is one (``3``, ``3.0``), else None."""
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    return None
