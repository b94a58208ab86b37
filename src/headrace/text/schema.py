"""Schemas as they are compiled: with bounded blanks between tokens, and closed where they only list properties.

An object schema that lists its properties and says nothing of others allows any other; a model held to it may go on
inventing them until its tokens run out. Such objects are compiled as if they said ``additionalProperties: false``, as
OpenAI's strict schemas must: whatever comes out validates against the schema as it was sent.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Final
from urllib.parse import unquote

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


def find_loop(schema: object) -> str | None:
    """Gives a local ``$ref`` that no finite value fits, for it leads back to itself first; None where there is none.

    Cost: a few walks over what is referred to as a rule; the square of it at the worst.
    """
    targets = {ref: _target(schema, ref) for ref in _refs(schema)}
    endless = [ref for ref, target in targets.items() if target is not None]
    while endless:
        # In turn from both ends: a chain of references is settled in one walk, whichever way it is written.
        endless.reverse()
        left = set(endless)
        for ref in endless:
            if _ends(targets[ref], left):
                left.discard(ref)
        if len(left) == len(endless):
            return endless[0]
        endless = [ref for ref in endless if ref in left]
    return None


def _refs(schema: object) -> Iterator[str]:
    if isinstance(schema, list):
        for item in schema:
            yield from _refs(item)
    elif isinstance(schema, dict):
        ref = schema.get("$ref")
        if isinstance(ref, str):
            yield ref
        for value in schema.values():
            yield from _refs(value)


def _target(schema: object, ref: str) -> object:
    """Gives what a local reference points to; None where it is not local or points nowhere: another says so."""
    if not ref.startswith("#/"):
        return schema if ref == "#" else None
    for part in ref[2:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isascii() and key.isdigit() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict):
            schema = schema.get(key)
        else:
            return None
    return schema


def _ends(schema: object, endless: Container[str]) -> bool:
    """Whether a finite value may fit, with those references that are not yet known to have one."""
    if not isinstance(schema, dict):
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref in endless:
        return False
    for name, needed in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and not needed(_ends(part, endless) for part in parts):
            return False
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        return all(_ends(properties.get(name), endless) for name in required if isinstance(name, str))
    if schema.get("type") == "array" and schema.get("minItems", 0) and "prefixItems" not in schema:
        return _ends(schema.get("items"), endless)
    return True
