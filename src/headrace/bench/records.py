"""What a load run leaves behind: one ``Exchange`` per request, and the ``Run`` that they belong to.

The generator writes a run to disk while it goes on, so memory stays flat however long it is; statistics and reports
read it from there, as often as they like. Nothing here computes a percentile.

The file is JSON Lines. The first line holds what was asked for (``Settings``, ``Environment``), then one line per
exchange in the order in which they ended, and the last line what only the end knows (``RunEnd``). A file without that
last line comes from a run that was killed; what it holds is still good.

**Definitions.** All times are seconds on one monotonic clock since the run's start, read when the operating system gave
us the bytes, before anything is parsed.

- *scheduled*: when the request was meant to be sent. In an open loop this is the arrival process's time, however late
  we or the server were; in a closed loop the moment at which its slot took it. Latencies count from here.
- *TTFT* = ``first_s − scheduled_s``: the first chunk that carries output (text, reasoning or a tool call; not the
  chunk that only names the role). Of an answer that is not streamed: its first byte.
- *ITL*: the gaps of ``chunk_s``. A server that bundles tokens has fewer and longer gaps; compare those by TPOT.
- *TPOT* = ``(chunk_s[-1] − first_s) ÷ (output_tokens − 1)``, the first token left out.
- *E2E* = ``ended_s − scheduled_s``: until the answer's last byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Literal, Self

import msgspec

from headrace.base.errors import RequestError

SCHEMA: Final = 1

Operation = Literal["chat", "completions", "embeddings", "rerank"]
Arrivals = Literal["poisson", "constant", "ramp", "trace"]
# connect: no connection. timeout: no whole answer within the limit. status: not 2xx. stream_error: an error inside the
# stream. no_done: the stream ended without [DONE]. malformed: not HTTP, SSE or JSON as it should be. reset: the
# connection ended within the answer. cut: we stopped it (Ctrl-C, SIGTERM).
ErrorKind = Literal["connect", "timeout", "status", "stream_error", "no_done", "malformed", "reset", "cut"]


class Exchange(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One request and its answer; the times are defined in the module's docstring.

    Args:
        index: in the order of sending, from 0; warm-up included.
        line: of the sample in its file, from 1; 0 where samples are made up.
        sent_s: when the request was handed to the operating system; None when there never was a connection.
        ended_s: last byte of the answer, or when it failed.
        chunk_s: when each chunk with output came, ascending; empty where the answer is not streamed.
        prompt_tokens, output_tokens, cached_tokens: by the server's usage; None where it says nothing.
        prompt_tokens_counted, output_tokens_counted: by the tokenizer; None where there is none.
        status: of HTTP; None when no answer began.
        error: None when all went well.
        detail: what the error said, at most 200 characters.
        turn: of a conversation, from 0.
        is_warmup: left out of all figures.
    """

    index: int
    operation: Operation
    scheduled_s: float
    sent_s: float | None
    first_s: float | None
    ended_s: float
    chunk_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens_counted: int | None = None
    output_tokens_counted: int | None = None
    status: int | None = None
    error: ErrorKind | None = None
    detail: str = ""
    finish_reason: str | None = None
    line: int = 0
    turn: int = 0
    process: int = 0
    is_warmup: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to send, how and for how long. Exactly one of ``concurrency`` (closed loop) and ``rate_per_s`` (open loop),
    or ``arrivals="trace"``, whose times come with the samples.

    Args:
        url: of the server, with or without ``/v1``.
        model: its name in requests.
        ramp_to_per_s: rate at the end of a ramp; it rises evenly from ``rate_per_s`` over ``duration_s``.
        trace_speed: how many times faster than recorded a trace is played.
        num_requests: to measure, those of the warm-up not among them; None until the samples end.
        duration_s: nothing is sent after ``warmup_s + duration_s``; what is under way then is waited for.
        warmup_requests, warmup_s: exchanges that are sent like all others and marked ``is_warmup``.
        timeout_s: for a whole answer, counted from sending.
        max_in_flight: of one process; with so many requests unanswered, further ones fail at once as ``timeout``.
        processes: that send; None chooses.
        data: what the samples are, for people.
        body: fields that every request gets, winning over the sample's.
        header_names: of the extra headers; their values are never written.
        tokenizer: folder that tokens are counted with; None counts none.
    """

    url: str
    model: str
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: Arrivals = "poisson"
    ramp_to_per_s: float | None = None
    trace_speed: float = 1.0
    num_requests: int | None = None
    duration_s: float | None = None
    warmup_requests: int = 0
    warmup_s: float = 0.0
    is_streamed: bool = True
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    max_in_flight: int = 20_000
    processes: int | None = None
    seed: int = 0
    data: str = ""
    body: dict[str, object] = {}
    header_names: tuple[str, ...] = ()
    tokenizer: str | None = None


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load came from: a figure means little without it."""

    headrace: str
    python: str
    system: str
    cpu: str
    num_cpus: int
    load_average: float


class Lag(msgspec.Struct, frozen=True):
    """How late something of ours was, in seconds."""

    p50_s: float
    p99_s: float
    max_s: float


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the generator itself cost.

    Args:
        loop_lag: how late the event loops woke up, sampled a hundred times a second.
        send_lag: ``sent_s − scheduled_s`` of requests that had a connection waiting.
        cpu_s: CPU seconds of all sending processes during the run.
        busiest_ratio: the largest share of a core that one of them used.
    """

    processes: int
    loop_lag: Lag
    send_lag: Lag
    cpu_s: float
    busiest_ratio: float


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What only a run's end knows.

    Args:
        measured_from_s: the end of the warm-up.
        duration_s: from the start to the last answer.
        is_partial: it was stopped before its end.
        num_exchanges: in the file.
        notes: what people should know, in sentences.
    """

    duration_s: float
    measured_from_s: float
    is_partial: bool
    num_exchanges: int
    overhead: Overhead
    notes: tuple[str, ...] = ()


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when a run starts.

    Args:
        headrace_run: number of this schema.
        started_at_s: since 1970 UTC.
    """

    headrace_run: int
    started_at_s: float
    settings: Settings
    environment: Environment


class _Version(msgspec.Struct, frozen=True):
    headrace_run: int


class _Tail(msgspec.Struct, frozen=True):
    end: RunEnd


@dataclass(frozen=True, slots=True)
class Run:
    """A run, whole or partial.

    Args:
        exchanges: can be gone through any number of times; read from disk each time where the run lies on disk.
        end: None when the run was killed before it could write one.
    """

    start: RunStart
    end: RunEnd | None
    exchanges: Collection[Exchange]

    @property
    def settings(self) -> Settings:
        """What was asked for."""
        return self.start.settings

    @property
    def is_partial(self) -> bool:
        """Whether it ended before it was meant to."""
        return self.end is None or self.end.is_partial


@dataclass(frozen=True, slots=True)
class StoredExchanges:
    """The exchanges of a file, one at a time in memory."""

    path: Path
    num_exchanges: int = field(repr=False)

    def __len__(self) -> int:
        return self.num_exchanges

    def __contains__(self, exchange: object) -> bool:
        return any(exchange == other for other in self)

    def __iter__(self) -> Iterator[Exchange]:
        with self.path.open("rb") as lines:
            lines.readline()
            for line in lines:
                if not line.startswith(b'{"end"') and line.endswith(b"\n"):
                    yield _EXCHANGE.decode(line)


_ENCODER: Final = msgspec.json.Encoder()
_EXCHANGE: Final = msgspec.json.Decoder(Exchange)


def encode_exchange(exchange: Exchange) -> bytes:
    """Gives the line of an exchange, with its line break."""
    return _ENCODER.encode(exchange) + b"\n"


class RunWriter:
    """Writes a run to disk while it goes on.

    Args:
        path: is replaced where it exists.
    """

    def __init__(self, path: Path, start: RunStart) -> None:
        self._path = path
        self._start = start
        self._num_exchanges = 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(_ENCODER.encode(start) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, lines: bytes, num_exchanges: int) -> None:
        """Appends whole lines, as ``encode_exchange`` makes them."""
        self._file.write(lines)
        self._num_exchanges += num_exchanges

    def finish(
        self,
        *,
        duration_s: float,
        measured_from_s: float,
        is_partial: bool,
        overhead: Overhead,
        notes: tuple[str, ...] = (),
    ) -> Run:
        """Writes the end and gives the run."""
        end = RunEnd(
            duration_s=duration_s,
            measured_from_s=measured_from_s,
            is_partial=is_partial,
            num_exchanges=self._num_exchanges,
            overhead=overhead,
            notes=notes,
        )
        self._file.write(_ENCODER.encode(_Tail(end)) + b"\n")
        self._file.close()
        return Run(self._start, end, StoredExchanges(self._path, self._num_exchanges))


def read_run(path: Path) -> Run:
    """Gives the run that a file holds; every line is checked once.

    Raises:
        RequestError: it is no such file, of another schema, or a line is damaged; the message names file and line.

    Cost: one pass over the file.
    """
    number = 0
    end: RunEnd | None = None
    num_exchanges = 0
    try:
        with path.open("rb") as lines:
            number = 1
            first = lines.readline()
            schema = msgspec.json.decode(first, type=_Version).headrace_run
            if schema != SCHEMA:
                raise RequestError(f"{path} has schema {schema} of runs; this version reads {SCHEMA}")
            start = msgspec.json.decode(first, type=RunStart)
            for line in lines:
                number += 1
                if line.startswith(b'{"end"'):
                    end = msgspec.json.decode(line, type=_Tail).end
                elif line.endswith(b"\n"):  # a last line that a kill cut is not counted
                    _EXCHANGE.decode(line)
                    num_exchanges += 1
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path}, line {number}, is no record of a load run: {error}") from error
    return Run(start, end, StoredExchanges(path, num_exchanges))
