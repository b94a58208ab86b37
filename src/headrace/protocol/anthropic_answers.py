"""Anthropic's answers: a message made of blocks, whole or as named events, and its own shape of errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from headrace.base.errors import HeadraceError
from headrace.protocol import sse
from headrace.protocol.answers import Choice, Piece, Usage

_encode = msgspec.json.Encoder().encode

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

Block = Literal["thinking", "text", "tool_use"]


class MessageWriter:
    """Writes one message.

    Args:
        usage: gives the counts so far; the prompt's is known when the first event is written.
    """

    def __init__(self, message_id: str, model: str, usage: Callable[[], Usage]) -> None:
        self._id = message_id
        self._model = model
        self._usage = usage
        self._num_blocks = 0
        self._open: Block | None = None
        self._finish: tuple[str | None, str | int | None] = (None, None)

    def opening(self, index: int, usage: Usage | None) -> bytes:
        """Gives the event that opens the message."""
        message = self._message([], None, None, dataclasses.replace(self._usage(), completion_tokens=0))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def say(self, piece: Piece, usage: Usage | None) -> bytes:
        """Gives the events of a piece; a block is opened and closed as the pieces change their kind."""
        parts: list[bytes] = []
        if piece.thought:
            self._enter("thinking", {"thinking": "", "signature": ""}, parts)
            parts.append(self._delta({"type": "thinking_delta", "thinking": piece.thought}))
        if piece.text:
            self._enter("text", {"text": ""}, parts)
            parts.append(self._delta({"type": "text_delta", "text": piece.text}))
        call = piece.call
        if call is not None:
            if call.name is not None:
                self._leave(parts)
                self._enter("tool_use", {"id": call.id, "name": call.name, "input": {}}, parts)
            if call.arguments:
                parts.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        if piece.finish_reason is not None:
            self._leave(parts)
            self._finish = (piece.finish_reason, piece.stop)
        return b"".join(parts)

    def ending(self, usage: Usage) -> bytes:
        """Gives the events that end the message."""
        reason, stop = _stop_reason(*self._finish)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", {"delta": delta, "usage": _usage(usage)}) + _event("message_stop", {})

    def whole(self, choices_made: Sequence[Choice], usage: Usage, *, has_logprobs: bool) -> bytes:
        """Gives the whole message."""
        choice = choices_made[0]
        blocks: list[dict[str, object]] = []
        if choice.thought:
            blocks.append({"type": "thinking", "thinking": choice.thought, "signature": ""})
        if choice.text:
            blocks.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            arguments = "".join(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(arguments)})
        return _encode(self._message(blocks, *_stop_reason(choice.finish_reason, choice.stop), usage))

    def _message(
        self, blocks: list[dict[str, object]], reason: str | None, stop: str | None, usage: Usage
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": _usage(usage),
        }

    def _enter(self, block: Block, start: dict[str, object], parts: list[bytes]) -> None:
        if self._open == block and block != "tool_use":
            return
        self._leave(parts)
        self._open = block
        content = {"type": block, **start}
        parts.append(_event("content_block_start", {"index": self._num_blocks, "content_block": content}))

    def _leave(self, parts: list[bytes]) -> None:
        if self._open is not None:
            self._open = None
            parts.append(_event("content_block_stop", {"index": self._num_blocks}))
            self._num_blocks += 1

    def _delta(self, delta: dict[str, object]) -> bytes:
        return _event("content_block_delta", {"index": self._num_blocks, "delta": delta})


def error_body(error: HeadraceError, request_id: str) -> bytes:
    """Gives Anthropic's error object."""
    kind = _ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return _encode({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id})


def error_frame(error: HeadraceError, request_id: str) -> bytes:
    """Gives the event that tells an error in a stream that has begun."""
    return sse.event(b"error", error_body(error, request_id))


def _event(name: str, fields: dict[str, object]) -> bytes:
    return sse.event(name.encode(), _encode({"type": name, **fields}))


def _stop_reason(reason: str | None, stop: str | int | None) -> tuple[str | None, str | None]:
    if reason is None:
        return None, None
    if reason == "stop" and isinstance(stop, str):
        return "stop_sequence", stop
    return _STOP_REASONS.get(reason, "end_turn"), None


def _usage(usage: Usage) -> dict[str, int]:
    """Gives the counts; what came from the prefix cache is counted apart, as Anthropic does."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _input(arguments: str) -> object:
    """Gives the arguments as an object; where a call was cut, what is there as text, so that nothing is made up."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"partial_json": arguments}
