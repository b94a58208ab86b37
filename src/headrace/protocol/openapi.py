"""``/openapi.json``: every route of the public listener, its request, its answers and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.protocol.openapi_answers import ANSWERS
from headrace.protocol.openapi_encode import (
    CLASSIFY,
    EMBED,
    EMBED_ALL,
    EMBEDDINGS,
    ENCODE_ANSWERS,
    INVOKED,
    POOLING,
    PREDICT,
    RERANK,
    SCORE,
    SIMILARITY,
    TASK,
)
from headrace.protocol.openapi_parts import CHAT, COMPLETION, DETOKENIZE, MESSAGES, OPTIONS, TOKENIZE, Schema, ref
from headrace.protocol.rerank import DOCUMENTS, FIRST_TEXTS, SECOND_TEXTS

_BODY_ERRORS: Final = {
    400: "a field is wrong: `error.param` names it; or the context is too short for it",
    404: "the model is not served here",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON, or is compressed",
}
_RUN_ERRORS: Final = {
    403: "the request asks for more than its caller may",
    422: "the request has ended workers before and is not run again",
    500: "the engine failed",
    503: "no room, no healthy worker, or the model is loading: come back after `retry-after`",
    504: "the answer did not come in time",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route.

    Args:
        fields: of the request's body; empty for GET.
        required: those that must be there.
        one_of: groups of names of one field; of each exactly one must be there.
        some_of: at least one of these must be there.
        answer: name of the answer's schema; None for plain text.
        has_stream: with ``stream: true`` the answer is an event stream.
    """

    path: str
    method: str
    name: str
    summary: str
    answer: str | None
    fields: dict[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)
    has_stream: bool = False
    error: str = "Error"
    one_of: tuple[tuple[str, ...], ...] = ()
    some_of: tuple[str, ...] = ()


_RUN: Final = {**_BODY_ERRORS, **_RUN_ERRORS}
_COUNT: Final = {**_BODY_ERRORS, 503: _RUN_ERRORS[503]}
_NOT_READY: Final = {503: "the model is loading, or no worker is healthy"}

OPERATIONS: Final = (
    Operation("/v1/chat/completions", "post", "createChatCompletion", "Answers a conversation.", "ChatAnswer",
              CHAT, ("messages",), _RUN, has_stream=True),
    Operation("/v1/chat/completions/input_tokens", "post", "countChatTokens", "Counts a conversation's prompt.",
              "CountAnswer", CHAT, ("messages",), _COUNT),
    Operation("/v1/completions", "post", "createCompletion", "Continues a text.", "CompletionAnswer",
              COMPLETION, ("prompt",), _RUN, has_stream=True),
    Operation("/v1/messages", "post", "createMessage", "Answers a conversation, in Anthropic's form.", "MessageAnswer",
              MESSAGES, ("messages", "max_tokens"), _RUN, has_stream=True, error="MessageError"),
    Operation("/v1/messages/count_tokens", "post", "countMessageTokens", "Counts a message's prompt.", "CountAnswer",
              MESSAGES, ("messages",), _COUNT, error="MessageError"),
    Operation("/tokenize", "post", "tokenize", "Gives a text's or a conversation's token ids.", "Tokens",
              TOKENIZE, (), _COUNT, some_of=("prompt", "content", "messages")),
    Operation("/detokenize", "post", "detokenize", "Gives the text of token ids.", "Text",
              DETOKENIZE, ("tokens",), _COUNT),
    Operation("/tokenizer_info", "get", "tokenizerInfo", "Says how the model reads and writes.", "TokenizerInfo",
              errors=_NOT_READY),
    Operation("/v1/embeddings", "post", "createEmbeddings", "Makes a vector of each input.", "Embeddings",
              EMBEDDINGS, ("input",), _RUN),
    Operation("/v1/rerank", "post", "rerank", "Orders documents by a query (Cohere, Jina, TEI).", "Ranking",
              RERANK, ("query",), _RUN, one_of=(DOCUMENTS,)),
    Operation("/v2/rerank", "post", "rerank2", "The same.", "Ranking", RERANK, ("query",), _RUN, one_of=(DOCUMENTS,)),
    Operation("/v1/score", "post", "score", "Scores pairs of texts.", "Scores", SCORE, (), _RUN,
              one_of=(FIRST_TEXTS, SECOND_TEXTS)),
    Operation("/v1/classify", "post", "classify", "Gives each text's class.", "Classes", CLASSIFY, ("input",), _RUN),
    Operation("/embed", "post", "embed", "Vectors, in TEI's form.", "Vectors", EMBED, ("inputs",), _RUN),
    Operation("/v1/pooling", "post", "pooling", "What the model makes of each token (vLLM).", "Pooled",
              POOLING, ("input",), _RUN),
    Operation("/embed_all", "post", "embedAll", "Every token's vector, in TEI's form.", "TokenVectors",
              EMBED_ALL, ("inputs",), _RUN),
    Operation("/similarity", "post", "similarity", "Cosines to one text, in TEI's form.", "Similarities",
              SIMILARITY, ("inputs",), _RUN),
    Operation("/predict", "post", "predict", "Classes, in TEI's form.", "Predictions", PREDICT, ("inputs",), _RUN),
    Operation("/", "post", "task", "What the model is for, in the form of Hugging Face's inference API.", "TaskAnswer",
              TASK, (), _RUN, some_of=("inputs", "query")),
    Operation("/info", "get", "encoderInfo", "What a model that does not generate is, in TEI's form.", "EncoderInfo",
              errors={400: "the model generates", 503: _NOT_READY[503]}),
    Operation("/invocations", "post", "invoke", "The endpoint whose fields the body has.", "Invoked",
              {"model": OPTIONS["model"], **INVOKED}, (), _RUN, some_of=tuple(INVOKED)),
    Operation("/load", "get", "load", "How many requests this front has.", "Load"),
    Operation("/v1/models", "get", "listModels", "Lists what is served.", "Models"),
    Operation("/v1/models/{model}", "get", "getModel", "Looks one up.", "Model", errors={404: _BODY_ERRORS[404]}),
    Operation("/health", "get", "health", "200 when a request would be taken.", "Health", errors=_NOT_READY),
    Operation("/livez", "get", "live", "200 while the process turns.", "Health"),
    Operation("/readyz", "get", "ready", "200 when a request would be taken.", "Health", errors=_NOT_READY),
    Operation("/startupz", "get", "startup", "200 when the model was loaded once.", "Health", errors=_NOT_READY),
    Operation("/metrics", "get", "metrics", "Prometheus text.", None, errors={401: "not on loopback without a key"}),
    Operation("/version", "get", "version", "The server's version.", "Version"),
    Operation("/openapi.json", "get", "openapi", "This document.", None),
)  # fmt: skip


def build_document(version: str) -> dict[str, object]:
    """Gives the document (OpenAPI 3.1)."""
    paths: dict[str, dict[str, object]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": (
                "Fields that are not listed are ignored and named in the header `x-headrace-ignored-fields`. A field "
                "of OpenAI's or vLLM's that would change the answer and is not supported is a 400 that names it. "
                "The routes under /v1 are also there without it."
            ),
        },
        "paths": paths,
        "components": {"schemas": {**ANSWERS, **ENCODE_ANSWERS}},
    }


def _operation(operation: Operation) -> dict[str, object]:
    responses: dict[str, object] = {"200": _ok(operation)}
    for status, text in sorted(operation.errors.items()):
        is_page = operation.method == "get" and status == 503 and operation.path not in ("/tokenizer_info", "/info")
        shape = "Health" if is_page else operation.error
        responses[str(status)] = {"description": text, "content": {"application/json": {"schema": ref(shape)}}}
    out: dict[str, object] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": responses,
    }
    if operation.fields:
        schema: Schema = {"type": "object", "properties": operation.fields, "required": list(operation.required)}
        conditions = [_exactly_one(names) for names in operation.one_of]
        if operation.some_of:
            conditions.append({"anyOf": [_given(name) for name in operation.some_of]})
        if conditions:
            schema["allOf"] = conditions
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{model}" in operation.path:
        parameter = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        out["parameters"] = [parameter]
    return out


def _given(name: str) -> Schema:
    """Says that a field is there; null is absent."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _exactly_one(names: tuple[str, ...]) -> Schema:
    branches: list[Schema] = []
    for name in names:
        others: Schema = {other: {"type": "null"} for other in names if other != name}
        branches.append({"required": [name], "properties": {name: {"not": {"type": "null"}}, **others}})
    return {"anyOf": branches}


def _ok(operation: Operation) -> dict[str, object]:
    content: dict[str, object] = {}
    if operation.path == "/openapi.json":
        content["application/json"] = {"schema": {"type": "object"}}
    elif operation.answer is None:
        content["text/plain"] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": ref(operation.answer)}
    if operation.has_stream:
        # No type: tools take an event for a string or for an object of its fields.
        content["text/event-stream"] = {"schema": {"description": "Server-sent events, the data of each a JSON text."}}
    if "embed_dtype" in operation.fields:
        content["application/octet-stream"] = {"schema": {"description": "Vectors one behind the other, as bytes."}}
    return {"description": "The answer.", "content": content}
