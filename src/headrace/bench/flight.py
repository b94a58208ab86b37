"""One request under way: what its answer has brought so far, and when."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.bench.records import ErrorKind, Exchange, Operation
from headrace.bench.stream import DONE, EventReader, Usage, read_answer, read_chunk

_MAX_DETAIL_CHARS: Final = 200
_MAX_ERROR_BYTES: Final = 64 * 2**10


class Flight:
    """A request from its schedule to its end. All moments are ``time.monotonic``.

    Args:
        is_kept: whether the answer's text will be wanted: to count its tokens or to go on with the conversation.
        is_fresh: it was never tried on a connection that had served before; such a one may be stale.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_events",
        "_is_done",
        "_is_kept",
        "_is_streamed",
        "_texts",
        "chunk_s",
        "detail",
        "ended_s",
        "error",
        "finish_reason",
        "first_s",
        "index",
        "is_fresh",
        "is_retried",
        "line",
        "operation",
        "scheduled_s",
        "sent_s",
        "status",
        "turn",
        "usage",
        "wire",
    )

    def __init__(
        self,
        index: int,
        operation: Operation,
        scheduled_s: float,
        wire: bytes,
        *,
        line: int = 0,
        turn: int = 0,
        is_kept: bool = False,
    ) -> None:
        self.index = index
        self.operation: Operation = operation
        self.scheduled_s = scheduled_s
        self.wire = wire
        self.line = line
        self.turn = turn
        self.sent_s: float | None = None
        self.first_s: float | None = None
        self.ended_s = 0.0
        self.chunk_s: list[float] = []
        self.status: int | None = None
        self.error: ErrorKind | None = None
        self.detail = ""
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.is_fresh = True
        self.is_retried = False
        self._is_kept = is_kept
        self._is_streamed = False
        self._is_done = False
        self._events: EventReader | None = None
        self._texts: list[str] = []
        self._body: list[bytes] = []
        self._body_bytes = 0

    @property
    def text(self) -> str:
        """What was answered, as far as it was kept."""
        return "".join(self._texts)

    def begin(self, status: int, *, is_event_stream: bool) -> None:
        """The answer's head has come."""
        self.status = status
        self._is_streamed = is_event_stream and 200 <= status < 300
        if self._is_streamed:
            self._events = EventReader()

    def take(self, data: bytes, at_s: float) -> None:
        """A part of the answer's body has come, at ``at_s``."""
        if self._events is not None:
            try:
                for payload in self._events.feed(data):
                    self._take_event(payload, at_s)
            except ValueError as error:
                self.fail("malformed", str(error))
            return
        if self.first_s is None and self._is_good:
            self.first_s = at_s
        self._body_bytes += len(data)
        if self._is_good or self._body_bytes <= _MAX_ERROR_BYTES:
            self._body.append(data)

    def finish(self, at_s: float) -> None:
        """The answer is whole, since ``at_s``."""
        self.ended_s = at_s
        if not self._is_good:
            self.fail("status", f"{self.status}: {_shorten(b''.join(self._body))}")
        elif not self._is_streamed:
            self._read_whole()
        elif not self._is_done:
            self.fail("no_done", "the stream ended without [DONE]")

    def fail(self, kind: ErrorKind, detail: str) -> None:
        """Notes what went wrong; the first counts."""
        if self.error is None:
            self.error = kind
            self.detail = detail[:_MAX_DETAIL_CHARS]

    def exchange(
        self, start_s: float, *, process: int, is_warmup: bool, counted: tuple[int | None, int | None] = (None, None)
    ) -> Exchange:
        """Gives the record of the whole.

        Args:
            start_s: of the run; all moments become seconds since.
            counted: tokens of prompt and answer by the tokenizer.
        """
        usage = self.usage
        return Exchange(
            index=self.index,
            operation=self.operation,
            scheduled_s=round(self.scheduled_s - start_s, 6),
            sent_s=None if self.sent_s is None else round(self.sent_s - start_s, 6),
            first_s=None if self.first_s is None else round(self.first_s - start_s, 6),
            ended_s=round(self.ended_s - start_s, 6),
            chunk_s=tuple([round(at_s - start_s, 6) for at_s in self.chunk_s]),
            prompt_tokens=usage.prompt_tokens if usage else None,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            prompt_tokens_counted=counted[0],
            output_tokens_counted=counted[1],
            status=self.status,
            error=self.error,
            detail=self.detail,
            finish_reason=self.finish_reason,
            line=self.line,
            turn=self.turn,
            process=process,
            is_warmup=is_warmup,
        )

    @property
    def _is_good(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    def _take_event(self, payload: bytes, at_s: float) -> None:
        if payload == DONE:
            self._is_done = True
            return
        try:
            chunk = read_chunk(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail("malformed", f"{error}: {_shorten(payload)}")
            return
        error_text = chunk.error_text
        if error_text is not None:
            self.fail("stream_error", error_text)
        if chunk.usage is not None:
            self.usage = chunk.usage
        has_output = False
        for choice in chunk.choices:
            text, is_output = choice.outputs()
            has_output = has_output or is_output
            if text and self._is_kept:
                self._texts.append(text)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if has_output:
            if self.first_s is None:
                self.first_s = at_s
            self.chunk_s.append(at_s)

    def _read_whole(self) -> None:
        body = b"".join(self._body)
        try:
            if self.operation in ("embeddings", "rerank"):
                self.usage = read_answer(body).usage
                return
            answer = read_chunk(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.fail("malformed", f"{error}: {_shorten(body)}")
            return
        self.usage = answer.usage
        for choice in answer.choices:
            self.finish_reason = choice.finish_reason
            if self._is_kept:
                self._texts.append(choice.outputs()[0])


def _shorten(data: bytes) -> str:
    return " ".join(data[: 4 * _MAX_DETAIL_CHARS].decode("utf-8", "replace").split())[:_MAX_DETAIL_CHARS]
