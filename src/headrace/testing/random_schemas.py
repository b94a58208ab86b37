"""JSON Schemas of the shapes that applications send: records of records, lists, choices, references, bounds, patterns.

Every schema ends: lists and texts are bounded, so an answer of a few hundred tokens is enough for most.
"""

from __future__ import annotations

import random
from typing import Any, Final

_NAMES: Final = (
    "id", "name", "kind", "status", "items", "address", "city", "price_eur", "created-at", "tags", "größe", "note",
    "is_open", "parent", "lines", "$meta", "x y",
)  # fmt: skip
_PATTERNS: Final = ("^[A-Z]{2}-[0-9]{3}$", "^(ja|nein)$", "^[a-z]+(_[a-z]+){0,2}$", "^\\d{4}$")
_FORMATS: Final = ("date", "time", "ipv4", "uuid")


class SchemaMaker:
    """Makes schemas from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (test data)
        self._has_definitions = False

    def make(self) -> dict[str, Any]:
        """Makes a record at least three levels deep, with definitions that its parts refer to."""
        self._has_definitions = False  # two that refer to nothing but each other would have no value
        definitions = {f"def{index}": self._value(1) for index in range(2)}
        self._has_definitions = True
        schema = self._record(4)
        schema["properties"]["first"] = {"$ref": "#/$defs/def0"}
        schema["properties"]["deep"] = {"type": "array", "items": self._record(2), "minItems": 1, "maxItems": 2}
        schema["required"] = [*schema["required"], "first", "deep"]
        return {**schema, "$defs": definitions}

    def _record(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(_NAMES, self._random.randrange(1, 4))
        required = [name for name in names if self._random.random() < 0.7]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth - 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
        if self._random.random() < 0.3:
            schema["description"] = "what an application says about it"
        return schema

    def _value(self, depth: int) -> dict[str, Any]:
        leaves = (self._text, self._integer, self._number, self._choice, self._boolean, self._nullable)
        if depth <= 0 or self._random.random() < 0.4:
            return self._random.choice(leaves)()
        branches = (self._record, self._list, self._union, self._reference)
        return self._random.choice(branches[: 4 if self._has_definitions else 3])(depth)

    def _text(self) -> dict[str, Any]:
        match self._random.randrange(3):
            case 0:
                return {"type": "string", "pattern": self._random.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(_FORMATS)}
            case _:
                return {"type": "string", "minLength": self._random.randrange(3), "maxLength": 8}

    def _integer(self) -> dict[str, Any]:
        low = self._random.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.choice((0, 9, 1000))}

    def _number(self) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self._random.choice((1, 100.5))}

    def _choice(self) -> dict[str, Any]:
        return {"enum": self._random.sample(["open", "closed", 3, None, True, "ä b", 'q"q'], 3)}

    def _boolean(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def _nullable(self) -> dict[str, Any]:
        return {"anyOf": [self._integer(), {"type": "null"}]}

    def _list(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self._value(depth - 1), "minItems": self._random.randrange(2), "maxItems": 2}

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._record(depth - 1), self._text()]}

    def _reference(self, _depth: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/def{self._random.randrange(2)}"}


def depth_of(schema: object) -> int:
    """Gives how many records and lists stand inside each other at most."""
    if isinstance(schema, list):
        return max(map(depth_of, schema), default=0)
    if not isinstance(schema, dict):
        return 0
    here = schema.get("type") in ("object", "array")
    return here + max((depth_of(value) for value in schema.values()), default=0)
