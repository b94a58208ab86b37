"""OpenAI's answers for chat and text completions: stream chunks, whole answers, usage, error bodies.

Chunks are built from fixed byte strings, because one is made per token and request: about 1 µs instead of 10.
Data flow: the gateway's ``Piece`` values come in, JSON bytes go out; framing as SSE is ``protocol.sse``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from headrace.base.errors import HeadraceError

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


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine step adds to one choice. ``finish_reason`` closes the choice."""

    index: int
    text: str
    entries: list[TokenEntry] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> bytes:
        """Gives the ``usage`` object."""
        return (
            b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
            % (
                self.prompt_tokens,
                self.completion_tokens,
                self.prompt_tokens + self.completion_tokens,
                self.cached_tokens,
            )
        )


class AnswerWriter:
    """Writes the chunks or the whole answer of one request.

    Args:
        kind: which endpoint's shape.
        answer_id, created_s, model, fingerprint: constant over all chunks.
        has_usage: chunks carry ``usage: null``, and a usage chunk is coming.
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
    ) -> None:
        self._is_chat = kind == "chat"
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

    def role(self, index: int) -> bytes:
        """Gives the chunk that opens a choice; nothing for text completions."""
        if not self._is_chat:
            return b""
        return (
            self._chunk_head
            + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
            + self._close
        )

    def chunks(self, piece: Piece, usage: Usage | None = None) -> list[bytes]:
        """Gives the chunks that say ``piece``: its text, then its finish where it has one.

        Args:
            usage: the counts so far, put into each chunk (``continuous_usage_stats``).
        """
        close = self._close if usage is None else b'],"usage":' + usage.as_json() + b"}"
        if piece.finish_reason is None and piece.entries is None and usage is None:
            return [self._chunk_head + b'{"index":%d' % piece.index + self._middle + _encode(piece.text) + self._end]
        finish = b"null" if piece.finish_reason is None else b'"' + piece.finish_reason.encode() + b'"'
        logprobs = self._logprobs(piece.entries)
        if not self._is_chat:
            body = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
                piece.index, _encode(piece.text), logprobs, finish,
            )  # fmt: skip
            return [self._chunk_head + body + close]
        chunks: list[bytes] = []
        if piece.text or piece.entries:
            body = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}' % (
                piece.index, _encode(piece.text), logprobs,
            )  # fmt: skip
            chunks.append(self._chunk_head + body + close)
        if piece.finish_reason is not None:
            body = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (piece.index, finish)
            chunks.append(self._chunk_head + body + close)
        return chunks

    def usage(self, usage: Usage) -> bytes:
        """Gives the usage chunk that ends a stream."""
        return self._chunk_head + b'],"usage":' + usage.as_json() + b"}"

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> bytes:
        """Gives a whole answer from one joined piece per choice, in order of their index."""
        name = b'"chat.completion"' if self._is_chat else b'"text_completion"'
        choices: list[bytes] = []
        for piece in pieces:
            finish = _encode(piece.finish_reason)
            logprobs = self._logprobs(piece.entries)
            if self._is_chat:
                choices.append(
                    b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":%b,'
                    b'"finish_reason":%b}' % (piece.index, _encode(piece.text), logprobs, finish)
                )
            else:
                choices.append(
                    b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
                    % (piece.index, _encode(piece.text), logprobs, finish)
                )
        return self._head % name + b",".join(choices) + b'],"usage":' + usage.as_json() + b"}"

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


def _legacy_top(entry: TokenEntry) -> dict[str, float] | None:
    """Gives the alternatives by their text, best first; the chosen token is always among them."""
    if entry.logprob is None:
        return None
    top: dict[str, float] = {}
    for other in entry.top:
        top.setdefault(other.token, other.logprob)
    if top:
        top.setdefault(entry.token, entry.logprob)
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
