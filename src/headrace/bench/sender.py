"""A sending process: takes samples from the run's process, sends each at its moment, gives back records.

Started as ``python -m headrace.bench.sender FD``, with one end of a socket pair. It ends when all is answered, or when
the other side goes away.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.bench.connection import Pool, parse_target
from headrace.bench.flight import Flight
from headrace.bench.lag import LagMeter, Readings
from headrace.bench.link import Cut, Done, Go, NoMore, Pulse, Ready, Setup, Work, encode, read_to_sender
from headrace.bench.records import encode_exchange
from headrace.bench.talk import Talk, Wire
from headrace.bench.timer import Timer

if TYPE_CHECKING:
    from headrace.bench.counting import TokenCounter

_TICK_S: Final = 0.1
_MAX_LATEST: Final = 50


class Sender:
    """Sends what it is given.

    Args:
        pool: with ``landed`` of this object as its ear.
        count: None, or what counts tokens; it runs in a thread of its own.
    """

    def __init__(self, setup: Setup, writer: asyncio.StreamWriter, timer: Timer, counter: TokenCounter | None) -> None:
        target = parse_target(setup.settings.url)
        self._setup = setup
        self._settings = setup.settings
        self._writer = writer
        self._timer = timer
        self._counter = counter
        self._thread = ThreadPoolExecutor(1, "count") if counter is not None else None
        self._num_counting = 0
        self._wire = Wire(target, setup.headers)
        self.pool = Pool(target, self._landed, connect_timeout_s=self._settings.connect_timeout_s)
        self._lag = LagMeter(timer)
        self._late_s = Readings()
        self._start_s = self._stop_s = float("inf")
        self._cpu_s = 0.0
        self._waiting: deque[Talk] = deque()
        self._num_free = 0
        self._num_scheduled = 0
        self._talks: dict[Flight, Talk] = {}
        self._is_last_known = False
        self.is_over = asyncio.Event()
        self._reset_pulse()
        self._num_chunks_told = self._num_chunks_ended = 0
        self._first_measured_s: float | None = None

    def go(self, message: Go) -> None:
        """Starts the run at the moment that all senders share."""
        self._start_s = message.start_s
        self._stop_s = float("inf") if message.stop_s is None else message.stop_s
        self._lag.start(message.start_s)
        self._timer.call_at(message.start_s, self._begin)
        self._timer.call_at(message.start_s + _TICK_S, self._tick)

    def add(self, work: Work) -> None:
        """Takes a sample; one that comes after the time limit is dropped."""
        if work.at_s is None and time.monotonic() >= self._stop_s:
            return
        talk = Talk(work.index, work.sample, self._settings, self._wire, is_counted=self._counter is not None)
        if work.at_s is not None:
            self._schedule(talk, self._start_s + work.at_s)
        elif self._num_free:
            self._num_free -= 1
            self._launch(talk, time.monotonic())
        else:
            self._waiting.append(talk)

    def no_more(self) -> None:
        """Notes that the last sample has come."""
        self._is_last_known = True
        self._check_end()

    def cut(self) -> None:
        """Stops everything."""
        self._is_last_known = True
        self._stop_s = 0.0
        self._waiting.clear()
        self.pool.stop_all(time.monotonic())
        self._check_end()

    def _begin(self) -> None:
        self._cpu_s = time.process_time()
        for _ in range(self._setup.concurrency or 0):
            self._fill_slot()

    def _fill_slot(self) -> None:
        """Closed loop: a slot is free."""
        now_s = time.monotonic()
        if now_s >= self._stop_s:
            self._waiting.clear()
        if self._waiting:
            self._launch(self._waiting.popleft(), now_s)
        else:
            self._num_free += 1

    def _schedule(self, talk: Talk, at_s: float) -> None:
        def send() -> None:
            self._num_scheduled -= 1
            if self._stop_s:
                self._launch(talk, at_s)

        self._num_scheduled += 1
        self._timer.call_at(at_s, send)

    def _launch(self, talk: Talk, scheduled_s: float) -> None:
        flight = talk.take_off(scheduled_s)
        self._talks[flight] = talk
        self._num_sent += 1
        if self.pool.num_flights >= self._settings.max_in_flight:
            flight.fail("timeout", f"{self._settings.max_in_flight} requests were under way already")
            flight.ended_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._landed, flight)
            return
        self.pool.send(flight)
        if flight.sent_s is not None:
            self._late_s.add(flight.sent_s - scheduled_s)

    def _landed(self, flight: Flight) -> None:
        talk = self._talks.pop(flight)
        self._num_chunks_ended += len(flight.chunk_s)
        if flight.error is not None:
            self._num_failed += 1
        elif len(self._latest_s) < _MAX_LATEST and flight.first_s is not None:
            self._latest_s.append((flight.first_s - flight.scheduled_s, flight.ended_s - flight.scheduled_s))
        if self._counter is None or self._thread is None or flight.error is not None:
            self._note(flight, (None, None))
        else:
            self._count(flight, talk.body)
        pause_s = talk.advance(flight.text) if flight.error is None else None
        if pause_s is not None and time.monotonic() + pause_s < self._stop_s:
            self._schedule(talk, time.monotonic() + pause_s)
            return
        self._num_samples += 1
        if self._setup.concurrency is not None:
            self._fill_slot()
        self._check_end()

    def _count(self, flight: Flight, body: dict[str, object]) -> None:
        counter, loop = self._counter, asyncio.get_running_loop()
        assert counter is not None, "only called with one"
        assert self._thread is not None, "made with it"
        text = flight.text
        self._num_counting += 1

        def work() -> None:
            counted = (counter.count_prompt(body), counter.count(text))
            loop.call_soon_threadsafe(finish, counted)

        def finish(counted: tuple[int, int]) -> None:
            self._num_counting -= 1
            self._note(flight, counted)
            self._check_end()

        self._thread.submit(work)

    def _note(self, flight: Flight, counted: tuple[int | None, int | None]) -> None:
        since_s = flight.scheduled_s - self._start_s
        is_warmup = flight.index < self._settings.warmup_requests or since_s < self._settings.warmup_s
        if is_warmup:
            self._num_warmup += 1
        elif self._first_measured_s is None or since_s < self._first_measured_s:
            self._first_measured_s = since_s
        exchange = flight.exchange(self._start_s, process=self._setup.process, is_warmup=is_warmup, counted=counted)
        self._num_exchanges += 1
        self._output_tokens += exchange.output_tokens or len(exchange.chunk_s)
        self._lines.append(encode_exchange(exchange))

    def _tick(self) -> None:
        now_s = time.monotonic()
        self.pool.fail_older(now_s - self._settings.timeout_s, now_s)
        if now_s >= self._stop_s:
            self._waiting.clear()
            self._check_end()
        self._tell()
        if not self.is_over.is_set():
            self._timer.call_at(now_s + _TICK_S, self._tick)

    def _check_end(self) -> None:
        is_idle = not (self._talks or self._waiting or self._num_scheduled or self._num_counting)
        if is_idle and (self._is_last_known or time.monotonic() >= self._stop_s):
            self.is_over.set()

    def _reset_pulse(self) -> None:
        self._lines: list[bytes] = []
        self._num_exchanges = self._num_samples = self._num_warmup = self._num_failed = self._num_sent = 0
        self._output_tokens = 0
        self._latest_s: list[tuple[float, float]] = []

    def _tell(self) -> None:
        num_chunks = self._num_chunks_ended + sum(len(flight.chunk_s) for flight in self._talks)
        pulse = Pulse(
            lines=b"".join(self._lines),
            num_exchanges=self._num_exchanges,
            num_samples=self._num_samples,
            num_warmup=self._num_warmup,
            num_failed=self._num_failed,
            num_sent=self._num_sent,
            num_in_flight=len(self._talks),
            num_chunks=num_chunks - self._num_chunks_told,
            output_tokens=self._output_tokens,
            latest_s=self._latest_s,
            first_measured_s=self._first_measured_s,
        )
        self._num_chunks_told = num_chunks
        self._reset_pulse()
        self._writer.write(encode(pulse))

    async def finish(self) -> None:
        """Says the rest and what it cost."""
        self._lag.stop()
        self._tell()
        now_s = time.monotonic()
        done = Done(
            cpu_s=time.process_time() - self._cpu_s,
            wall_s=max(0.0, now_s - self._start_s),
            lags_s=self._lag.lags_s.values(),
            late_s=self._late_s.values(),
        )
        self._writer.write(encode(done))
        await self.pool.close()


async def _listen(sender: Sender, reader: asyncio.StreamReader) -> None:
    while not sender.is_over.is_set():
        match await read_to_sender(reader):
            case Work() as work:
                sender.add(work)
            case Go() as go:
                sender.go(go)
            case NoMore():
                sender.no_more()
            case Cut():
                sender.cut()
            case Setup():
                raise AssertionError("set up once")
            case None:  # nobody wants the answers any more
                sys.exit(1)


async def send(fd: int) -> None:
    """Runs one sender on an inherited socket."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    setup = await read_to_sender(reader)
    assert isinstance(setup, Setup), "the first message"
    counter = None
    if setup.settings.tokenizer is not None:
        from headrace.bench.counting import TokenCounter  # loads the library, which few runs need

        counter = TokenCounter(Path(setup.settings.tokenizer))
    timer = Timer(asyncio.get_running_loop())
    sender = Sender(setup, writer, timer, counter)
    await sender.pool.open(setup.num_open)
    gc.collect()
    gc.freeze()  # nothing so far needs to be looked at again while the clock runs
    writer.write(encode(Ready()))
    listening = asyncio.create_task(_listen(sender, reader))
    over = asyncio.create_task(sender.is_over.wait())
    await asyncio.wait([listening, over], return_when=asyncio.FIRST_COMPLETED)
    if listening.done():
        listening.result()
    await sender.finish()
    listening.cancel()
    timer.close()
    writer.close()
    await writer.wait_closed()  # or the last words would be lost with the loop


def _raise_file_limit() -> None:
    """Lets the process hold as many connections as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    _raise_file_limit()
    asyncio.run(send(int(sys.argv[1])))
