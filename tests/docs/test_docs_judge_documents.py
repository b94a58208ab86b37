"""What the judges make of an OpenAPI document: requests are narrowed to the model, answers stay as they are written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from judging.documents import Served, cut, narrowed, within  # noqa: E402

from headrace.protocol.openapi import build_document  # noqa: E402

SERVED = Served("demo", width=384)
FOREIGN: dict[str, Any] = {
    "paths": {
        "/completions": {
            "post": {
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Asked"}}}}
            }
        }
    },
    "components": {
        "schemas": {
            "Asked": {
                "allOf": [
                    {"$ref": "#/components/schemas/Shared"},
                    {
                        "type": "object",
                        "properties": {
                            "prompt": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
                            "n": {"type": "integer", "minimum": 1, "maximum": 128},
                            "suffix": {"type": "string"},
                            "max_tokens": {"type": "integer", "minimum": 0},
                        },
                        "required": ["prompt"],
                    },
                ]
            },
            "Shared": {"type": "object", "properties": {"model": {"type": "string"}, "top_p": {"type": "number"}}},
            "Unused": {},
        }
    },
}


def _body_of(document: dict[str, Any], path: str) -> jsonschema.Draft202012Validator:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def test_a_request_is_narrowed_to_the_model_and_an_answer_is_not() -> None:
    document = narrowed(cut(build_document("1"), ("/tokenize", "/v1/completions", "/v1/embeddings")), SERVED)

    completion = _body_of(document, "/v1/completions")
    assert completion.is_valid({"model": "demo", "prompt": [1, 29_999], "max_tokens": 8})
    for wrong in ({"model": "other"}, {"prompt": [30_000]}, {"max_tokens": 9}, {"stop_token_ids": [10**6]}):
        assert not completion.is_valid({"model": "demo", "prompt": "x", "max_tokens": 1, **wrong}), wrong
    assert not _body_of(document, "/v1/embeddings").is_valid({"model": "demo", "input": "x", "dimensions": 385})
    tokens = document["components"]["schemas"]["Tokens"]["properties"]["tokens"]
    assert jsonschema.Draft202012Validator(tokens).is_valid([49_151])


def test_a_foreign_document_is_narrowed_to_our_ranges() -> None:
    foreign = within(cut(FOREIGN, ("/completions",)), build_document("1"), "/v1", {"suffix"})
    body = _body_of(narrowed(foreign, SERVED), "/completions")

    good = {"model": "demo", "prompt": "x", "max_tokens": 1}
    assert body.is_valid({**good, "n": 8, "top_p": 0.5})
    for wrong in ({"n": 9}, {"top_p": 0}, {"prompt": ""}, {"prompt": [-1]}, {"model": "other"}):
        assert not body.is_valid({**good, **wrong}), wrong
    assert "suffix" not in str(foreign["paths"])
    assert "Unused" not in foreign["components"]["schemas"]
