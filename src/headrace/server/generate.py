"""The generating endpoints, chat and text completions: body in, one answer or a stream of chunks out.

Raw ASGI, because a write per token goes through here. What a stream promises:
headers are held until the first token, at most ``header_hold_s``, so that early failures keep their status; from then
on a comment every ``ping_interval_s``; a failure after the first byte is one error frame and the end, without [DONE].
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from headrace.base.errors import HeadraceError
from headrace.base.ids import new_id
from headrace.base.recorder import Recorder
from headrace.gateway.deadlines import Deadline
from headrace.gateway.ledger import Ledger, Record
from headrace.gateway.models import Models
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.run import Run
from headrace.protocol import sse
from headrace.protocol.answers import AnswerWriter, Choice, Writer
from headrace.protocol.anthropic_answers import MessageWriter
from headrace.protocol.anthropic_answers import error_body as anthropic_error
from headrace.protocol.anthropic_answers import error_frame as anthropic_error_frame
from headrace.protocol.launch import Kind
from headrace.protocol.openai import GenerateRequest
from headrace.server.connection import SLOW_CLIENT
from headrace.server.endpoint import Endpoint
from headrace.server.exchange import BODY_IDLE_S, Exchange


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How streams behave, and how large a body may be."""

    max_body_bytes: int = 4 * 2**20
    header_hold_s: float = 10.0
    ping_interval_s: float = 15.0
    body_idle_s: float = BODY_IDLE_S


class MakeWriter(Protocol):
    """Makes the writer of one answer."""

    def __call__(self, request: GenerateRequest, run: Run, created_s: int, fingerprint: str) -> Writer:
        """Makes it, when the request has been submitted or is about to be."""
        ...


def openai_writer(request: GenerateRequest, run: Run, created_s: int, fingerprint: str) -> Writer:
    """Makes the writer of a chat or text completion."""
    options = request.options
    answer_id = new_id("chatcmpl" if request.kind == "chat" else "cmpl")
    return AnswerWriter(
        request.kind,
        answer_id,
        created_s,
        options.model,
        fingerprint,
        has_usage=options.has_usage,
        token_ids=options.has_token_ids,
        prompt_ids=run.prompt_ids,
    )


def anthropic_writer(request: GenerateRequest, run: Run, created_s: int, fingerprint: str) -> Writer:
    """Makes the writer of a message."""
    return MessageWriter(new_id("msg"), request.options.model, lambda: run.usage)


def speak_anthropic(exchange: Exchange) -> None:
    """Makes an exchange's errors Anthropic's; its clients read the request's id from a header of their own."""
    exchange.standing.append((b"request-id", exchange.request_id.encode()))
    exchange.error_body = anthropic_error
    exchange.error_frame = anthropic_error_frame


class GenerateEndpoint(Endpoint):
    """One generating endpoint.

    Args:
        name: for metrics and logs.
        parse: reads its body.
        make_writer: writes its answers.
        executor: where large bodies are parsed.
    """

    def __init__(
        self,
        name: str,
        parse: Callable[[bytes], GenerateRequest],
        make_writer: MakeWriter = openai_writer,
        *,
        models: Models,
        ledger: Ledger,
        recorder: Recorder,
        settings: StreamSettings,
        executor: Executor,
    ) -> None:
        super().__init__(name, models=models, ledger=ledger, recorder=recorder, executor=executor)
        self._make_writer = make_writer
        self._parse = parse
        self._settings = settings

    async def _serve(self, exchange: Exchange, record: Record) -> None:
        settings = self._settings
        request = await self._read(exchange, self._parse, settings.max_body_bytes, settings.body_idle_s)
        pipeline = self._find(record, request.options.model, Kind.GENERATE)
        if not request.options.model:
            named = dataclasses.replace(request.options, model=pipeline.name)
            request = dataclasses.replace(request, options=named)
        options = request.options
        record.is_stream = options.is_stream
        headers = self._ignored.note(options.ignored_fields + pipeline.renderer.ignored_values(request))
        run = Run(pipeline, request, record)
        try:
            if options.is_stream:
                await _Stream(exchange, run, self._writer(pipeline, run), pipeline, self._settings, headers).send()
            else:
                await self._answer(exchange, pipeline, run, headers)
        finally:
            run.close()

    async def _answer(
        self, exchange: Exchange, pipeline: Pipeline, run: Run, headers: list[tuple[bytes, bytes]]
    ) -> None:
        await run.open()
        choices = [Choice(index) for index in range(run.num_choices)]
        while pieces := await run.take():
            for piece in pieces:
                choices[piece.index].add(piece)
        has_logprobs = run.request.options.num_logprobs is not None
        body = self._writer(pipeline, run).whole(run.chosen(choices), run.usage, has_logprobs=has_logprobs)
        await exchange.answer(200, body, headers)

    def _writer(self, pipeline: Pipeline, run: Run) -> Writer:
        identity = pipeline.replica.identity
        fingerprint = "hr-" + (identity.model_digest[:16] if identity is not None else "none")
        return self._make_writer(run.request, run, int(pipeline.clock.wall_s()), fingerprint)


class _Stream:
    """The sending side of one stream."""

    def __init__(
        self,
        exchange: Exchange,
        run: Run,
        writer: Writer,
        pipeline: Pipeline,
        settings: StreamSettings,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        self._exchange = exchange
        self._run = run
        self._writer = writer
        self._pipeline = pipeline
        self._settings = settings
        self._headers = headers
        self._opened: set[int] = set()
        self._timer: Deadline | None = None
        self._beat: asyncio.Task[None] | None = None
        connection = exchange.connection
        if connection is not None:
            run.on_overrun = lambda: connection.cut(SLOW_CLIENT)

    async def send(self) -> None:
        """Runs the request and sends its stream to the end."""
        self._timer = self._pipeline.deadlines.after(self._settings.header_hold_s, self._on_timer)
        try:
            await self._run.open()
            await self._send_pieces()
        except HeadraceError:
            self._timer.cancel()
            if self._beat is not None:
                await self._beat
            raise
        finally:
            self._timer.cancel()
            if self._beat is not None:
                self._beat.cancel()

    async def _send_pieces(self) -> None:
        run = self._run
        exchange = self._exchange
        is_plain = not run.request.options.has_continuous_usage
        told = run.usage
        while pieces := await run.take():
            parts: list[bytes] = []
            if not is_plain and not self._opened:
                told = dataclasses.replace(run.usage, completion_tokens=0)
            for piece in pieces:
                if piece.index not in self._opened:
                    self._opened.add(piece.index)
                    parts.append(self._writer.opening(piece.index, None if is_plain else told))
                if not is_plain:
                    told = run.usage
                parts.append(self._writer.say(piece, None if is_plain else told))
            if self._beat is not None and not self._beat.done():
                await self._beat
            if not exchange.has_begun:
                await exchange.begin_stream(self._headers)
                self._restart_timer()
            if run.is_finished:
                parts.append(self._writer.ending(run.usage))
                await exchange.end_stream(b"".join(parts))
                return
            await exchange.write(b"".join(parts))

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._pipeline.deadlines.after(self._settings.ping_interval_s, self._on_timer)

    def _on_timer(self) -> None:
        """Sends the head if it was held until now, and a comment; none while an earlier one is not yet out."""
        if self._beat is None or self._beat.done():
            self._beat = asyncio.get_running_loop().create_task(self._send_beat())
        self._restart_timer()

    async def _send_beat(self) -> None:
        if self._exchange.is_complete:
            return
        if not self._exchange.has_begun:
            await self._exchange.begin_stream(self._headers)
        await self._exchange.write(sse.PING)
