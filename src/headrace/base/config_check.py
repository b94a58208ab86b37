"""Whether a value may stand for a setting: types, choices and bounds of ``base.config_schema``, in words for people.

A value is of its setting's type or it is refused: no text is taken for a number, no number for a truth. An integer may
stand where a number is wanted.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """What bounds a setting; None bounds nothing.

    Args:
        ge, gt, le, lt: of a number.
        is_finite: refuses infinities and NaN.
        min_chars, max_chars: of a text.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    is_finite: bool = False
    min_chars: int | None = None
    max_chars: int | None = None


_KINDS: Final = {int: "integer", float: "number", bool: "boolean", str: "string"}


def check_value(value: object, annotation: object) -> tuple[object, str | None]:
    """Gives the value as the setting's type has it, and what is wrong with it, or None.

    Args:
        annotation: of a field in ``base.config_schema``, resolved.
    """
    parts = list(members(annotation))
    if value is None and type(None) in parts:
        return None, None
    kind, rules = split(parts[0])
    if typing.get_origin(kind) is typing.Literal:
        choices = [repr(choice) for choice in typing.get_args(kind)]
        is_one = isinstance(value, str) and value in typing.get_args(kind)
        return value, None if is_one else f"input should be {', '.join(choices[:-1])} or {choices[-1]}"
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        assert isinstance(kind, type)
        return value, f"input should be a valid {_KINDS[kind]}"
    return value, next((fault for rule in rules if (fault := _fault(value, rule)) is not None), None)


def members(annotation: object) -> Iterator[object]:
    """Yields the members of a union, or what is none itself."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for part in typing.get_args(annotation):
            yield from members(part)
    else:
        yield annotation


def split(annotation: object) -> tuple[object, list[Rule]]:
    """Gives a type without its rules, and the rules."""
    if typing.get_origin(annotation) is typing.Annotated:
        kind, *extras = typing.get_args(annotation)
        return kind, [extra for extra in extras if isinstance(extra, Rule)]
    return annotation, []


def _fault(value: object, rule: Rule) -> str | None:
    if isinstance(value, str):
        if rule.min_chars is not None and len(value) < rule.min_chars:
            return f"string should have at least {_characters(rule.min_chars)}"
        if rule.max_chars is not None and len(value) > rule.max_chars:
            return f"string should have at most {_characters(rule.max_chars)}"
        return None
    assert isinstance(value, int | float)
    if rule.is_finite and not math.isfinite(value):
        return "input should be a finite number"
    for limit, is_kept, words in (
        (rule.ge, operator.ge, "greater than or equal to"),
        (rule.gt, operator.gt, "greater than"),
        (rule.le, operator.le, "less than or equal to"),
        (rule.lt, operator.lt, "less than"),
    ):
        if limit is not None and not is_kept(value, limit):
            return f"input should be {words} {limit}"
    return None


def _characters(count: int) -> str:
    return f"{count} character{'' if count == 1 else 's'}"
