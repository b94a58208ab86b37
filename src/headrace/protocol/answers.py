"""OpenAI's answers for chat and text completions: stream chunks, whole answers, usage, error bodies.

Chunks are built from fixed byte strings, because one is made per token and request: about 1 µs instead of 10.
Data flow: the gateway's ``Piece`` values come in, JSON bytes go out; framing as SSE is ``protocol.sse``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec

from headrace.base.errors import HeadraceError
from headrace.protocol import sse

# JSON has no infinity: a banned token's log-probability is this, which clients read as "never".
LOWEST_LOGPROB: Final = -9999.0

_encode = msgspec.json.Encoder().encode


class TopToken(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(msgspec.Struct, frozen=True):
    """A token with its log-probability; ``logprob`` is None for the very first token of an echoed prompt.

    Args:
        offset: where its text starts in the choice's text, in characters.
        end: where it ends.
    """

    token: str
    logprob: float | None
    bytes: list[int]
    top: list[TopToken]
    offset: int
    end: int


class CallDelta(msgspec.Struct, frozen=True):
    """A part of the ``index``-th tool call: its beginning, with ``id`` and ``name``, or more of its arguments' JSON."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class Thought(msgspec.Struct, frozen=True):
    """A part of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step adds to one choice: text, a thought or a part of a call. ``finish_reason`` closes it.

    Args:
        entries: log-probabilities of tokens, with the text that they became.
        stop: the stop string, or the id of ``stop_token_ids``, that ended it, with its ``finish_reason``.
        token_ids: the ids of its tokens, where they are wanted.
        is_echo: it is the prompt.
    """

    index: int
    text: str = ""
    entries: list[TokenEntry] | None = None
    finish_reason: str | None = None
    thought: str = ""
    call: CallDelta | None = None
    stop: str | int | None = None
    token_ids: list[int] | None = None
    is_echo: bool = False


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    id: str
    name: str
    arguments: list[str]

    def as_json(self) -> dict[str, object]:
        """Gives the entry of ``tool_calls``."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.arguments)},
        }


class Choice:
    """A whole choice, joined from its pieces."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.entries: list[TokenEntry] = []
        self.finish_reason: str | None = None
        self.stop: str | int | None = None
        self.calls: list[Call] = []
        self.logprob_sum = 0.0
        self.prompt_ids: list[int] = []
        self.token_ids: list[int] = []
        self.prompt_logprobs: list[dict[str, object] | None] | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """What was thought before it."""
        return "".join(self._thoughts)

    def add(self, piece: Piece) -> None:
        """Takes the next piece."""
        self._texts.append(piece.text)
        self._thoughts.append(piece.thought)
        if piece.entries:
            self.entries += piece.entries
        if piece.token_ids:
            self.token_ids += piece.token_ids
        call = piece.call
        if call is not None and call.name is not None:
            self.calls.append(Call(call.id or "", call.name, [call.arguments]))
        elif call is not None:
            self.calls[call.index].arguments.append(call.arguments)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop = piece.stop if piece.stop is not None else self.stop


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, over all its choices. ``reasoning_tokens`` is None where the model does not think aloud."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    truncated_tokens: int = 0
    reasoning_tokens: int | None = None

    def as_json(self) -> bytes:
        """Gives the ``usage`` object; a prompt that was cut says by how much."""
        cut = b',"truncated_tokens":%d' % self.truncated_tokens if self.truncated_tokens else b""
        thought = b""
        if self.reasoning_tokens is not None:
            thought = b',"completion_tokens_details":{"reasoning_tokens":%d}' % self.reasoning_tokens
        return (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d%b}%b}'
            % (
                self.prompt_tokens,
                self.completion_tokens,
                self.prompt_tokens + self.completion_tokens,
                self.cached_tokens,
                cut,
                thought,
            )
        )


class Writer(Protocol):
    """Writes one request's answer, whole or as frames of an event stream."""

    def opening(self, index: int, usage: Usage | None) -> bytes:
        """Gives the frames that open a choice; with the counts so far where they are wanted in each."""
        ...

    def say(self, piece: Piece, usage: Usage | None) -> bytes:
        """Gives the frames that say a piece; with the counts so far where they are wanted in each."""
        ...

    def ending(self, usage: Usage) -> bytes:
        """Gives the frames that end the stream."""
        ...

    def whole(self, choices_made: Sequence[Choice], usage: Usage, *, has_logprobs: bool) -> bytes:
        """Gives the whole answer as one JSON body."""
        ...


class AnswerWriter:
    """Writes the chunks or the whole answer of one request.

    Args:
        kind: which endpoint's shape.
        answer_id, created_s, model, fingerprint: constant over all chunks.
        has_usage: chunks carry ``usage: null``, and a usage chunk is coming.
        token_ids: the ids of prompt and answer are wanted.
        prompt_ids: gives the prompt's tokens of a choice.
    """

    def __init__(
        self,
        kind: Literal["chat", "completion"],
        answer_id: str,
        created_s: int,
        model: str,
        fingerprint: str,
        *,
        has_usage: bool = False,
        token_ids: bool = False,
        prompt_ids: Callable[[int], list[int]] = lambda _: [],
    ) -> None:
        self._token_ids = token_ids
        self._prompt_ids = prompt_ids
        self._is_prompt_said: set[int] = set()
        self._is_chat = kind == "chat"
        self._has_usage = has_usage
        self._head = b'{"id":%b,"object":%%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
            _encode(answer_id).replace(b"%", b"%%"),
            created_s,
            _encode(model).replace(b"%", b"%%"),
            _encode(fingerprint).replace(b"%", b"%%"),
        )
        name = b'"chat.completion.chunk"' if self._is_chat else b'"text_completion"'
        self._chunk_head = self._head % name
        self._close = b'],"usage":null}' if has_usage else b"]}"
        self._middle = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._end = (
            b'},"logprobs":null,"finish_reason":null}' if self._is_chat else b',"logprobs":null,"finish_reason":null}'
        ) + self._close

    def opening(self, index: int, usage: Usage | None = None) -> bytes:
        """Gives the frame that opens a choice; nothing for text completions."""
        role = self.role(index, usage)
        return sse.data(role) if role else b""

    def say(self, piece: Piece, usage: Usage | None) -> bytes:
        """Gives the frames of ``chunks``."""
        return b"".join(map(sse.data, self.chunks(piece, usage)))

    def ending(self, usage: Usage) -> bytes:
        """Gives the usage chunk, where one was promised, and the end."""
        return (sse.data(self.usage(usage)) if self._has_usage else b"") + sse.DONE

    def role(self, index: int, usage: Usage | None = None) -> bytes:
        """Gives the chunk that opens a choice; nothing for text completions."""
        if not self._is_chat:
            return b""
        return (
            self._chunk_head
            + b'{"index":%d,"delta":{"role":"assistant"},"logprobs":null,"finish_reason":null}' % index
            + self._end_of(usage, self._of_prompt(index))
        )

    def chunks(self, piece: Piece, usage: Usage | None = None) -> list[bytes]:
        """Gives the chunks that say ``piece``: its text, then its finish where it has one.

        Args:
            usage: the counts so far, put into each chunk (``continuous_usage_stats``).
        """
        close = self._end_of(usage)
        ids = self._of_tokens(piece)
        if piece.finish_reason is None and piece.entries is None and usage is None and piece.text and not ids:
            return [self._chunk_head + b'{"index":%d' % piece.index + self._middle + _encode(piece.text) + self._end]
        finish = b"null" if piece.finish_reason is None else b'"' + piece.finish_reason.encode() + b'"'
        logprobs = self._logprobs(piece.entries)
        stop = b"" if piece.finish_reason is None else b',"stop_reason":' + _encode(piece.stop)
        if not self._is_chat:
            body = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
                piece.index, _encode(piece.text), logprobs, finish, stop + self._of_prompt(piece.index) + ids,
            )  # fmt: skip
            return [self._chunk_head + body + close]
        chunks: list[bytes] = []
        if piece.thought:
            thought = _encode(piece.thought)  # under both names that clients look for
            said = b'"reasoning_content":%b,"reasoning":%b' % (thought, thought)
            chunks.append(self._delta(piece.index, said, ids, close))
        elif piece.call is not None:
            chunks.append(self._delta(piece.index, b'"tool_calls":[%b]' % _call_delta(piece.call), ids, close))
        elif piece.text or piece.entries or piece.token_ids:
            # An empty text with log-probabilities: tokens whose characters are not whole yet, or are none.
            content = b'"content":' + _encode(piece.text) if piece.text or piece.entries else b""
            body = b'{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":null%b}' % (
                piece.index, content, logprobs, ids,
            )  # fmt: skip
            chunks.append(self._chunk_head + body + close)
        if piece.finish_reason is not None:
            body = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b%b}' % (piece.index, finish, stop)
            chunks.append(self._chunk_head + body + close)
        return chunks

    def usage(self, usage: Usage) -> bytes:
        """Gives the usage chunk that ends a stream."""
        return self._chunk_head + b'],"usage":' + usage.as_json() + b"}"

    def _delta(self, index: int, delta: bytes, ids: bytes, close: bytes) -> bytes:
        body = b'{"index":%d,"delta":{%b},"logprobs":null,"finish_reason":null%b}' % (index, delta, ids)
        return self._chunk_head + body + close

    def _end_of(self, usage: Usage | None, more: bytes = b"") -> bytes:
        """Gives the end of a chunk; ``more`` are fields of the chunk itself."""
        if not more and usage is None:
            return self._close
        told = b',"usage":' + (b"null" if usage is None else usage.as_json())
        return b"]" + more + (told if usage is not None or self._has_usage else b"") + b"}"

    def _of_prompt(self, index: int) -> bytes:
        """Gives the field of the prompt's tokens where they are wanted, in the first chunk that may carry them."""
        if not self._token_ids or index in self._is_prompt_said or (self._is_chat and self._is_prompt_said):
            return b""
        self._is_prompt_said.add(index)
        return b',"prompt_token_ids":' + _encode(self._prompt_ids(index))

    def _of_tokens(self, piece: Piece) -> bytes:
        if not self._token_ids or (self._is_chat and piece.token_ids is None):
            return b""
        return b',"token_ids":' + _encode(piece.token_ids or [])

    def whole(self, choices_made: Sequence[Choice], usage: Usage, *, has_logprobs: bool) -> bytes:
        """Gives a whole answer from its choices, in order of their index."""
        name = b'"chat.completion"' if self._is_chat else b'"text_completion"'
        choices: list[bytes] = []
        for choice in choices_made:
            finish = _encode(choice.finish_reason)
            logprobs = self._logprobs(choice.entries if has_logprobs else None)
            scores = b',"stop_reason":' + _encode(choice.stop)
            scores += b"" if self._is_chat else b',"prompt_logprobs":' + _encode(choice.prompt_logprobs)
            scores += b',"token_ids":' + _encode(choice.token_ids if self._token_ids else None)
            if not self._is_chat:
                scores += b',"prompt_token_ids":' + _encode(choice.prompt_ids if self._token_ids else None)
            if self._is_chat:
                choices.append(
                    b'{"index":%d,"message":%b,"logprobs":%b,"finish_reason":%b%b}'
                    % (choice.index, _encode(_message(choice)), logprobs, finish, scores)
                )
            else:
                choices.append(
                    b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
                    % (choice.index, _encode(choice.text), logprobs, finish, scores)
                )
        prompt = b""  # of a chat there is one prompt for all choices
        if self._is_chat:
            prompt = b',"prompt_logprobs":' + _encode(choices_made[0].prompt_logprobs)
            prompt += b',"prompt_token_ids":' + _encode(choices_made[0].prompt_ids if self._token_ids else None)
        return self._head % name + b",".join(choices) + b"]" + prompt + b',"usage":' + usage.as_json() + b"}"

    def _logprobs(self, entries: list[TokenEntry] | None) -> bytes:
        if entries is None:
            return b"null"
        if self._is_chat:
            content = [
                {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes, "top_logprobs": entry.top}
                for entry in entries
            ]
            return _encode({"content": content, "refusal": None})
        return _encode(
            {
                "text_offset": [entry.offset for entry in entries],
                "token_logprobs": [entry.logprob for entry in entries],
                "tokens": [entry.token for entry in entries],
                "top_logprobs": [_legacy_top(entry) for entry in entries],
            }
        )


def _call_delta(call: CallDelta) -> bytes:
    if call.name is None:
        return _encode({"index": call.index, "function": {"arguments": call.arguments}})
    function = {"name": call.name, "arguments": call.arguments}
    return _encode({"index": call.index, "id": call.id, "type": "function", "function": function})


def _message(choice: Choice) -> dict[str, object]:
    text: str | None = choice.text
    message: dict[str, object] = {"role": "assistant"}
    if choice.thought:
        message["reasoning_content"] = message["reasoning"] = choice.thought
    message["content"] = text if text or not choice.calls else None
    message["refusal"] = None
    if choice.calls:
        message["tool_calls"] = [call.as_json() for call in choice.calls]
    return message


def _legacy_top(entry: TokenEntry) -> dict[str, float] | None:
    """Gives the chosen token, then the alternatives by their text, best first."""
    if entry.logprob is None:
        return None
    top = {entry.token: entry.logprob}
    for other in entry.top:
        top.setdefault(other.token, other.logprob)
    return top


def finite(logprob: float) -> float:
    """Gives a log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def error_body(error: HeadraceError, request_id: str) -> bytes:
    """Gives the error object of api.md."""
    return _encode(
        {
            "error": {
                "message": error.message,
                "type": error.error_type,
                "param": error.param,
                "code": error.stable_code,
                "request_id": request_id,
            }
        }
    )
