"""Schemas as they are compiled: with bounded blanks between tokens, and closed where they only list properties.

An object schema that lists its properties and says nothing of others allows any other; a model held to it may go on
inventing them until its tokens run out. Such objects are compiled as if they said ``additionalProperties: false``, as
OpenAI's strict schemas must: whatever comes out validates against the schema as it was sent.
"""

from __future__ import annotations

from typing import Final

# Between JSON tokens: nothing, one space, or one line break with an indentation. Without a bound a small model may
# write blanks until its tokens run out.
_BLANK: Final = r"( |\n[ \t]{0,40})"
_BY_NAME: Final = ("properties", "$defs", "definitions", "patternProperties")
_NESTED: Final = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")
_OPENING: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties", "anyOf", "oneOf", "$ref")


def prepare(schema: object) -> object:
    """Gives a schema as it is to be compiled. Cost: one walk; schemas are at most 64 levels deep."""
    if not isinstance(schema, dict):
        return schema
    closed = schema if _is_joined(schema) else _close(schema)
    assert isinstance(closed, dict)
    return {**closed, "x-guidance": {"whitespace_pattern": _BLANK}}


def _is_joined(schema: object) -> bool:
    """Whether schemas are joined anywhere, so that one's properties are another's additional ones."""
    if isinstance(schema, list):
        return any(map(_is_joined, schema))
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema or ("properties" in schema and ("$ref" in schema or "anyOf" in schema or "oneOf" in schema)):
        return True
    return any(map(_is_joined, schema.values()))


def _close(schema: object) -> object:
    if isinstance(schema, list):
        return [_close(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = dict(schema)
    for name in _BY_NAME:
        inner = out.get(name)
        if isinstance(inner, dict):
            out[name] = {key: _close(value) for key, value in inner.items()}
    for name in _NESTED:
        if name in out:
            out[name] = _close(out[name])
    properties = out.get("properties")
    if isinstance(properties, dict) and properties and not any(name in out for name in _OPENING):
        required = out.get("required", [])
        if not isinstance(required, list) or all(name in properties for name in required if isinstance(name, str)):
            out["additionalProperties"] = False
    return out
