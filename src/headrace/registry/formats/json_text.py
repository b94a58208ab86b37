"""Strict, bounded JSON for foreign files: duplicate keys, NaN, depth and object floods are refused.

A 16 MiB text of ``[],[],[],…`` makes 350 MB of Python lists. Brackets and commas are therefore counted in the raw text
before it is parsed (those inside strings count too: honest headers have next to none), which bounds the memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from headrace.base.errors import ModelFormatError
from headrace.registry.files import shown


def parse_json(raw: bytes, path: Path, *, max_containers: int, max_items: int) -> Any:
    """Returns the value of ``raw``.

    Args:
        max_containers: objects and lists that the text may hold.
        max_items: commas and colons that the text may hold.

    Raises:
        ModelFormatError: not UTF-8, not JSON, a key twice in one object, NaN or infinity, too deep, too many parts.
    """
    for what, characters, limit in (("objects and lists", b"{[", max_containers), ("entries", b",:", max_items)):
        count = sum(raw.count(character) for character in characters)
        if count > limit:
            raise ModelFormatError(f"{path}: its JSON has {count} {what}, the limit is {limit}")

    def from_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # add returns None: falsy on purpose
            raise ModelFormatError(f"{path}: its JSON has the key {shown(twice)} twice in one object")
        return result

    def refuse_constant(name: str) -> NoReturn:
        raise ModelFormatError(f"{path}: its JSON holds {name}, which is not a JSON number")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=from_pairs, parse_constant=refuse_constant)
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: is not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ModelFormatError(f"{path}: its JSON is nested too deep") from error
    except ValueError as error:
        raise ModelFormatError(f"{path}: is not JSON: {error}") from error
