"""What one request asks for, before a server's name and settings are put to it.

Readers of data (files, traces, made-up lengths) yield ``Sample``s; the generator makes request bodies of them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.bench.records import Operation, Settings

PATHS: Final[dict[Operation, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
_STREAMED: Final = frozenset({"chat", "completions"})


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, or one conversation.

    Args:
        operation: decides the path.
        body: the request's fields but for ``model``, ``stream`` and ``stream_options``; ``messages`` for a chat,
            ``prompt`` for a completion, ``input`` for embeddings, ``query`` and ``documents`` for a rerank.
        line: in its file, from 1; 0 where it is made up.
        at_s: of a trace: seconds after its first request; None elsewhere.
        follow_ups: of a conversation: the messages that each further turn adds after the answer to the one before.
        pauses_s: how long the user thinks before each of ``follow_ups``; empty for not at all.
    """

    operation: Operation
    body: dict[str, object]
    line: int = 0
    at_s: float | None = None
    follow_ups: tuple[tuple[dict[str, object], ...], ...] = ()
    pauses_s: tuple[float, ...] = ()


def is_streamed(operation: Operation, settings: Settings) -> bool:
    """Whether the answer comes in chunks."""
    return settings.is_streamed and operation in _STREAMED


def request_body(sample: Sample, settings: Settings) -> dict[str, object]:
    """Gives the fields of the request: the sample's, the model's name, streaming, then the settings' own fields."""
    body: dict[str, object] = {**sample.body, "model": settings.model}
    if sample.operation in _STREAMED:
        body["stream"] = settings.is_streamed
        if settings.is_streamed:
            body["stream_options"] = {"include_usage": True}
    return {**body, **settings.body}
