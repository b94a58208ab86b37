"""Reads single values out of a model's own description (config.json, GGUF metadata), which is hostile input.

Every read has a range. A refusal names the file, the key, the value, the limit. Nothing is coerced: a string is not a
number, a bool is not an integer, 4.0 is not 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.base.errors import ModelFormatError

_MAX_SHOWN = 80


def show(value: object) -> str:
    """Returns ``value`` for a message, cut to a line: hostile files hold megabytes in a field."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


@dataclass(frozen=True, slots=True)
class Keys:
    """A mapping with typed, ranged reads. ``source`` names the file in messages, ``prefix`` the nesting of keys."""

    source: str
    values: Mapping[str, object]
    prefix: str = ""

    def has(self, key: str) -> bool:
        """Says whether ``key`` is there and not null."""
        return self.values.get(key) is not None

    def refuse(self, key: str, must: str) -> ModelFormatError:
        """Returns the error for ``key``; ``must`` says the limit, e.g. ``must be an integer in 1..64``."""
        return ModelFormatError(f"{self.source}: {self.prefix}{key} is {show(self.values.get(key))}, {must}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Returns an integer in [low, high]; a missing or null key gives ``default``, or is refused without one."""
        if not self.has(key):
            if default is None:
                raise ModelFormatError(f"{self.source}: {self.prefix}{key} is missing, must be in {low}..{high}")
            return default
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refuse(key, f"must be an integer in {low}..{high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Returns a finite number in [low, high]; missing or null gives ``default``, or is refused without one."""
        if not self.has(key):
            if default is None:
                raise ModelFormatError(f"{self.source}: {self.prefix}{key} is missing, must be in {low:g}..{high:g}")
            return default
        value = self.values[key]
        # Compared before it is converted: an int of a thousand digits is no float. NaN fails the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.refuse(key, f"must be a number in {low:g}..{high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Returns a bool; a missing or null key gives ``default``."""
        if not self.has(key):
            return default
        value = self.values[key]
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Returns a string; a missing or null key gives ``default``, or is refused without one."""
        if not self.has(key):
            if default is None:
                raise ModelFormatError(f"{self.source}: {self.prefix}{key} is missing, must be a string")
            return default
        value = self.values[key]
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def mapping(self, key: str) -> Keys | None:
        """Returns the nested mapping under ``key``, None when it is missing or null."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, Mapping):
            raise self.refuse(key, "must be an object")
        return Keys(self.source, value, f"{self.prefix}{key}.")

    def integers(self, key: str, low: int, high: int, most: int) -> tuple[int, ...]:
        """Returns one integer or a list of at most ``most`` as a tuple, each in [low, high]; missing gives ()."""
        if not self.has(key):
            return ()
        value = self.values[key]
        items = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (value,)
        if len(items) > most:
            raise self.refuse(key, f"must have at most {most} entries")
        one = [Keys(self.source, {key: item}, self.prefix).integer(key, low, high) for item in items]
        return tuple(dict.fromkeys(one))

    def sequence(self, key: str, length: int) -> tuple[Keys, ...] | None:
        """Returns the entries of a list of exactly ``length``, each to be read under the key ``""``; None if absent."""
        if not self.has(key):
            return None
        value = self.values[key]
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != length:
            raise self.refuse(key, f"must be a list of {length} entries")
        return tuple(Keys(self.source, {"": item}, f"{self.prefix}{key}[{index}]") for index, item in enumerate(value))
