"""One answer of the mock server, from its first write to its last, with the faults that the script wants."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from headrace.bench.mock.answers import (
    KINDS,
    Asked,
    Frames,
    Kind,
    Plan,
    error_body,
    make_plan,
    models_body,
    read_asked,
    whole_answer,
)
from headrace.bench.mock.truth import Truth

if TYPE_CHECKING:
    from headrace.bench.mock.server import Connection, MockServer

MAX_BODY_BYTES: Final = 64 * 2**20
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class Answer:
    """The answer to one request, from its first write to its last."""

    __slots__ = (
        "_asked",
        "_at",
        "_body",
        "_connection",
        "_frames",
        "_has_begun",
        "_is_over",
        "_is_waiting",
        "_kind",
        "_method",
        "_num_bytes",
        "_plan",
        "_server",
        "_token",
        "truth",
    )

    _asked: Asked
    _frames: Frames
    _kind: Kind
    _plan: Plan

    def __init__(
        self, server: MockServer, connection: Connection, truth: Truth, method: bytes, body: bytes, num_bytes: int
    ) -> None:
        self._server = server
        self._connection = connection
        self._method = method
        self._body = body
        self._num_bytes = num_bytes
        self._at = 0
        self._token = 0
        self._has_begun = False
        self._is_over = False
        self._is_waiting = False
        self.truth = truth

    def route(self) -> None:
        """Finds what is asked for."""
        path, server = self.truth.path, self._server
        kind = KINDS.get(path)
        if kind is None:
            known = {"/health": b"", "/v1/models": models_body(server.script, created=server.created)}
            status = 404 if path not in known else 200 if self._method == b"GET" else 405
            body = known.get(path, b"")
            if status != 200:
                body = error_body(status, f"the mock has no {self._method.decode('latin-1')} {path}")
            at_s = server.wall_at(self.truth.arrival_s, 0.0)
            server.timer.call_at(at_s, lambda: self._send_aside(status, body))
            return
        self._kind = kind
        if self._method != b"POST":
            self._send_aside(405, error_body(405, f"{path} takes POST"))
            return
        if self._num_bytes > MAX_BODY_BYTES:
            self._send_aside(413, error_body(413, f"the body is over {MAX_BODY_BYTES} bytes"))
            return
        try:
            self._asked = read_asked(kind, self._body)
        except ValueError as error:  # msgspec's errors are ValueErrors, too
            self._send_aside(400, error_body(400, str(error)))
            return
        self._body = b""
        self._plan = make_plan(server.script, self.truth.number, kind, self._asked)
        server.leak()
        server.take(self)

    def begin(self, start_s: float) -> None:
        """Lays down the schedule, from ``start_s``."""
        self._has_begun = True
        server, plan, truth = self._server, self._plan, self.truth
        if plan.error is not None:
            truth.due_s = [server.wall_at(start_s, 0.0)]
        elif server.script.stall is None:
            truth.due_s = [start_s + due_s for due_s in plan.due_s]
        else:
            truth.due_s = [server.wall_at(start_s, due_s) for due_s in plan.due_s]
        if plan.error is not None or not plan.chunks:
            server.timer.call_at(truth.due_s[0], self._send_whole)
            return
        self._frames = Frames(server.script, self._kind, truth.number, self._asked, created=server.created)
        truth.status = 200
        if server.wall_at(start_s, 0.0) <= start_s:
            self._connection.transport.write(_STREAM_HEAD)
        else:
            server.timer.call_at(server.wall_at(start_s, 0.0), self._send_head)
        server.timer.call_at(truth.due_s[0], self._send_next)

    def resume(self) -> None:
        """The client reads again."""
        if self._is_waiting:
            self._is_waiting = False
            self._send_next()

    def end(self, fault: str | None) -> None:
        """Notes the end; nothing more is sent."""
        if self._is_over:
            return
        self._is_over = True
        self.truth.ended_s = time.monotonic()
        self.truth.fault = self.truth.fault or fault
        self.truth.tokens = self._token
        if hasattr(self, "_plan"):  # what was refused before had no place in line
            self._server.finish(self, self._has_begun)

    def _send_aside(self, status: int, body: bytes) -> None:
        """Answers what the script says nothing about."""
        if not self._is_over:
            self._is_over = True
            self._connection.send(status, body)
            self._connection.answered()

    def _send_head(self) -> None:
        if not self._is_over:
            self._connection.transport.write(_STREAM_HEAD)

    def _send_whole(self) -> None:
        if self._is_over:
            return
        script, plan, truth = self._server.script, self._plan, self.truth
        headers = b""
        if plan.error is not None:
            truth.status = plan.error.status
            body = error_body(truth.status, f"the script answers {truth.status}")
            if plan.error.retry_after_s is not None:
                headers = f"retry-after: {plan.error.retry_after_s:g}\r\n".encode()
        elif plan.fault is not None and self._has_failed():
            return
        else:
            truth.status = 200
            body = whole_answer(script, self._kind, truth.number, self._asked, plan, created=self._server.created)
            self._token = plan.num_tokens
        truth.write_s.append(time.monotonic())
        self._connection.send(truth.status, body, headers)
        self.end(None)
        self._connection.answered()

    def _send_next(self) -> None:
        if self._is_over:
            return
        connection, plan, truth = self._connection, self._plan, self.truth
        if connection.is_paused:
            self._is_waiting = True
            return
        parts = [self._frames.role()] if self._at == 0 else []
        for count in plan.chunks[self._at]:
            if plan.fault is not None and self._token + count > plan.fault.at_token:
                if parts:
                    self._write(b"".join(parts))
                    parts = []
                if self._has_failed():
                    return
            parts.append(self._frames.tokens(self._token, count))
            self._token += count
        self._at += 1
        if self._at < len(truth.due_s):
            self._write(b"".join(parts))
            self._server.timer.call_at(truth.due_s[self._at], self._send_next)
            return
        has_done = plan.fault is None or plan.fault.kind != "no_done"
        self._write(b"".join(parts) + self._frames.last(plan.num_tokens, has_done=has_done), b"0\r\n\r\n")
        self.end(None if has_done else "no_done")
        connection.answered()

    def _write(self, data: bytes, after: bytes = b"") -> None:
        """Sends one HTTP chunk and what follows it."""
        if data:
            frame = b"%x\r\n%b\r\n%b" % (len(data), data, after)
            self.truth.write_s.append(time.monotonic())
            self._connection.transport.write(frame)

    def _has_failed(self) -> bool:
        """Does the fault of the plan, once; says whether the answer is over by it."""
        fault = self._plan.fault
        assert fault is not None, "only called with one"
        connection = self._connection
        if self.truth.fault is not None:
            return False
        is_stream = bool(self._plan.chunks)
        match fault.kind:
            case "crash":
                self.truth.fault = "crash"
                self.end("crash")
                self._server.crash()
            case "hang":
                self.truth.fault = "hang"  # until the client leaves
            case "reset":
                self.end("reset")
                connection.reset()
            case "close":
                self.end("close")
                connection.transport.close()
            case "malformed":
                self.truth.fault = "malformed"
                if not is_stream:
                    connection.send(200, b'{"choices": [{"message": ')
                    self.end("malformed")
                    connection.answered()
                    return True
                self._write(b'data: {"choices": [{"delta": \n\n')
                return False
            case "stream_error":
                if is_stream:
                    self._write(b"data: " + error_body(500, "the script fails here") + b"\n\n", b"0\r\n\r\n")
                else:
                    self.truth.status = 500
                    connection.send(500, error_body(500, "the script fails here"))
                self.end("stream_error")
                connection.answered()
            case "no_done":
                return False
        return True
