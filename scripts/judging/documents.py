"""OpenAPI documents as schemathesis is given them: cut to some paths, and narrowed to what the server serves.

No document can know the model: its name, its vocabulary, the width of its vectors, or what an example may cost. What a
server of one model must refuse for such a reason would hide what it answers, so a request's fields are narrowed to it;
a foreign document's fields are also narrowed to the ranges that our own document says.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

Schema = dict[str, Any]

_MAX_TOKENS: Final = 8
# Every vocabulary served here has more ids: 30,522 and 49,152.
_MAX_TOKEN_ID: Final = 29_999
_JSON: Final = "application/json"


@dataclass(frozen=True)
class Served:
    """What the documents cannot know of a server.

    Args:
        model: the name that requests use.
        width: of its vectors; 0 where it makes none.
    """

    model: str
    width: int = 0


def cut(document: Schema, paths: tuple[str, ...]) -> Schema:
    """Keeps the operations that are asked for and what they point to."""
    kept: Schema = {path: document["paths"][path] for path in paths}
    if "get" in kept.get("/chat/completions", {}):
        kept["/chat/completions"] = {"post": kept["/chat/completions"]["post"]}  # no list of stored ones here
    components: dict[str, Schema] = {}
    todo: list[Any] = [kept]
    while todo:
        for kind, name in re.findall(r'"#/components/(\w+)/([^"/]+)', json.dumps(todo.pop())):
            if name not in components.setdefault(kind, {}):
                components[kind][name] = document["components"][kind][name]
                todo.append(components[kind][name])
    out: Schema = copy.deepcopy({**document, "paths": kept, "components": components})
    out.pop("webhooks", None)
    out.pop("security", None)
    return out


def waived(document: Schema) -> Schema:
    """Writes into a cut of OpenAI's document what its own service sends, and it lacks.

    Vectors as base64; event streams of text completions, and of chats, which it describes by an event's data where
    schemathesis looks at the event's own fields; null for the first token of an echoed prompt, which has no
    log-probability (evaluation harnesses count on it).
    """
    schemas = document["components"]["schemas"]
    if "Embedding" in schemas:
        vector = schemas["Embedding"]["properties"]["embedding"]
        schemas["Embedding"]["properties"]["embedding"] = {"anyOf": [vector, {"type": "string"}]}
    for path in {"/completions", "/chat/completions"} & document["paths"].keys():
        document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    if "/completions" in document["paths"]:
        choice = schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
        for form in choice["logprobs"]["anyOf"]:
            for name in {"token_logprobs", "top_logprobs"} & form.get("properties", {}).keys():
                entries = form["properties"][name]
                entries["items"] = {"anyOf": [{"type": "null"}, entries["items"]]}
    return document


def narrowed(document: Schema, served: Served) -> Schema:
    """Narrows the requests of a cut to the served model and a few tokens, in place."""
    for _, holder in _bodies(document):
        holder["schema"] = _inlined(document, holder["schema"])
        for part in _parts(holder["schema"]):
            _narrow(part, served)
    return document


def within(foreign: Schema, own: Schema, prefix: str, left_out: Collection[str]) -> Schema:
    """Narrows a foreign document's request fields to the ranges that our own document gives them, in place.

    Args:
        prefix: what stands before its paths in ours.
        left_out: fields that our server knows and refuses.
    """
    ours = {path: holder["schema"]["properties"] for path, holder in _bodies(own)}
    for path, holder in _bodies(foreign):
        holder["schema"] = _inlined(foreign, holder["schema"])
        for part in _parts(holder["schema"]):
            fields = part["properties"]
            for name in fields.keys() & set(left_out):
                del fields[name]
            for name in fields.keys() & ours[prefix + path].keys():
                range_ = ours[prefix + path][name]
                # What points elsewhere is described there, in both.
                if "$ref" not in json.dumps(range_):
                    fields[name] = {"allOf": [_inlined(foreign, fields[name]), range_]}
    return foreign


def _bodies(document: Schema) -> Iterator[tuple[str, Schema]]:
    """Gives each path that takes a JSON body, and what holds the body's schema."""
    for path, item in document["paths"].items():
        for operation in item.values():
            if isinstance(operation, dict) and _JSON in operation.get("requestBody", {}).get("content", {}):
                yield path, operation["requestBody"]["content"][_JSON]


def _inlined(document: Schema, schema: Schema) -> Schema:
    """Gives a schema without a reference at its top and at those of what it joins, as a copy."""
    while "$ref" in schema:
        *_, kind, name = schema["$ref"].split("/")
        schema = document["components"][kind][name]
    schema = copy.deepcopy(schema)
    if "allOf" in schema:
        schema["allOf"] = [_inlined(document, part) for part in schema["allOf"]]
    return schema


def _parts(schema: Schema) -> Iterator[Schema]:
    """Gives the schema and those that it joins, where they have fields."""
    if "properties" in schema:
        yield schema
    for part in schema.get("allOf", ()):
        yield from _parts(part)


def _narrow(part: Schema, served: Served) -> None:
    fields = part["properties"]
    if "model" in fields:
        fields["model"] = {"const": served.model}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in fields:
            fields[name] = {"type": "integer", "minimum": 1, "maximum": _MAX_TOKENS}
            part["required"] = sorted({*part.get("required", ()), name})
    if "min_tokens" in fields:
        fields["min_tokens"] = {"type": ["integer", "null"], "minimum": 0, "maximum": 1}
    if "logit_bias" in fields:
        bias = {"type": "integer", "minimum": -100, "maximum": 100}
        fields["logit_bias"] = {
            "type": "object",
            "propertyNames": {"pattern": "^[1-9][0-9]{0,3}$"},
            "additionalProperties": bias,
            "maxProperties": 300,
        }
    if "dimensions" in fields and served.width:
        fields["dimensions"] = {"type": "integer", "minimum": 1, "maximum": served.width}
    _narrow_ids(fields)


def _narrow_ids(value: Any) -> None:
    """Narrows every integer that stands in a list: such are token ids."""
    if isinstance(value, list):
        for item in value:
            _narrow_ids(item)
    if isinstance(value, dict):
        items = value.get("items")
        for item in (items, *items.get("anyOf", ())) if isinstance(items, dict) else ():
            if item.get("type") == "integer":
                item["minimum"], item["maximum"] = 0, _MAX_TOKEN_ID
        for item in value.values():
            _narrow_ids(item)
