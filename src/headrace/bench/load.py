"""One load run: starts the sending processes, hands out samples in time, writes what comes back.

    samples → ``run_load`` (this process) → senders (one process each) → the server
    records on disk ← ``run_load`` ← senders

This process never touches the server, so reading data and drawing the screen cannot disturb the timing.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.base.errors import ConfigError, MachineError
from headrace.bench.arrivals import arrival_times, check_settings
from headrace.bench.connection import parse_target
from headrace.bench.environment import read_environment
from headrace.bench.lag import summarize_lags
from headrace.bench.link import Cut, Done, Go, NoMore, Pulse, Ready, Setup, ToSender, Work, encode, read_from_sender
from headrace.bench.records import SCHEMA, Overhead, Run, RunStart, RunWriter, Settings
from headrace.bench.sample import Sample
from headrace.bench.talk import Wire

# One sender takes 0.4 ms of a Zen 3 core for a request of 8 chunks (`scripts/bench-accuracy` prints it): at this rate
# it is busy for less than half of its time, and its own lateness stays out of the figures.
_RATE_PER_PROCESS: Final = 1000.0
_CONCURRENCY_PER_PROCESS: Final = 512
_AHEAD_S: Final = 1.0  # so much earlier than they are due samples are handed out in an open loop
_BATCH_S: Final = 0.1  # of which so many seconds' worth go out together
_MAX_HELD: Final = 64
_CUTTING: Final = (signal.SIGINT, signal.SIGTERM)
_LEAD_S: Final = 0.15  # from the last word to the senders until the start


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a run has come; for the screen.

    Args:
        elapsed_s: since the start; negative never.
        num_total, total_s: what was asked for; None where it has no such limit.
        latest_s: (TTFT, E2E) of some that have ended since the snapshot before.
    """

    elapsed_s: float
    num_total: int | None
    total_s: float | None
    num_sent: int
    num_ended: int
    num_failed: int
    num_in_flight: int
    num_chunks: int
    output_tokens: int
    latest_s: tuple[tuple[float, float], ...]


ProgressSink = Callable[[Snapshot], None]


def run_load(
    settings: Settings,
    samples: Iterator[Sample],
    *,
    path: Path,
    headers: dict[str, str] | None = None,
    progress: ProgressSink | None = None,
) -> Run:
    """Sends samples as the settings say and records every answer. Blocks until all is answered.

    Ctrl-C or SIGTERM stops it and gives what there is, marked as partial. It must run in the main thread for that.

    Args:
        samples: taken one by one, as they are needed; the run ends when they do.
        path: of the record file, replaced where it exists; it stays the caller's.
        headers: extra ones, a key for example; never written anywhere.
        progress: called a few times a second.

    Raises:
        ConfigError: the settings contradict themselves, or a trace's sample has no time.
        MachineError: a sending process died.

    Cost: memory does not grow with the run.
    """
    check_settings(settings)
    target = parse_target(settings.url)
    Wire(target, headers or {})
    if settings.tokenizer is not None:
        from headrace.bench.counting import TokenCounter

        TokenCounter(Path(settings.tokenizer))
    return asyncio.run(_Load(settings, samples, path, headers or {}, progress).run())


def choose_processes(settings: Settings) -> int:
    """Gives how many processes send: as many as the load needs, and at most half of the CPUs."""
    if settings.processes is not None:
        return min(settings.processes, settings.concurrency or settings.processes)
    needed = 1
    if settings.concurrency is not None:
        needed = math.ceil(settings.concurrency / _CONCURRENCY_PER_PROCESS)
    elif settings.rate_per_s is not None:
        needed = math.ceil(max(settings.rate_per_s, settings.ramp_to_per_s or 0.0) / _RATE_PER_PROCESS)
    return max(1, min(needed, (os.cpu_count() or 1) // 2))


class _Sender:
    """A sending process as seen from here."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        share: int,
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer
        self.share = share
        self.num_wanted = 2 * share + 8  # a closed loop's senders hold as many again as they have slots
        self.num_in_flight = 0
        self.done: Done | None = None

        self._frames: list[bytes] = []

    def tell(self, message: ToSender) -> None:
        self.writer.write(encode(message))

    def hold(self, work: Work) -> None:
        """Keeps a sample back until ``flush``: one write for many."""
        self._frames.append(encode(work))

    async def flush(self) -> None:
        """Writes what was held back."""
        if self._frames:
            frames, self._frames = self._frames, []
            self.writer.write(b"".join(frames))
            await self.writer.drain()


class _Load:
    def __init__(
        self,
        settings: Settings,
        samples: Iterator[Sample],
        path: Path,
        headers: dict[str, str],
        progress: ProgressSink | None,
    ) -> None:
        self._settings = settings
        self._samples = samples
        self._path = path
        self._headers = headers
        self._progress = progress
        self._senders: list[_Sender] = []
        self._start_s = 0.0
        self._is_cut = False
        self._wants_more = asyncio.Event()
        self._num_sent = self._num_ended = self._num_failed = self._num_warmup = 0
        self._num_chunks = self._output_tokens = 0
        self._first_measured_s = math.inf
        self._latest_s: list[tuple[float, float]] = []

    async def run(self) -> Run:
        settings = self._settings
        loop = asyncio.get_running_loop()
        environment = read_environment()
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._start_senders(choose_processes(settings))
            if threading.current_thread() is threading.main_thread():
                for number in _CUTTING:
                    loop.add_signal_handler(number, self._cut)
            feeding = loop.create_task(self._feed())
            tasks.append(feeding)
            if settings.concurrency is not None:
                await asyncio.sleep(0)  # the first samples are there before the start
            self._start_s = time.monotonic() + _LEAD_S
            started_at_s = time.time() + _LEAD_S
            stop_s = None if settings.duration_s is None else self._start_s + settings.warmup_s + settings.duration_s
            for sender in self._senders:
                sender.tell(Go(self._start_s, stop_s if settings.concurrency is not None else None))
            start = RunStart(headrace_run=SCHEMA, started_at_s=started_at_s, settings=settings, environment=environment)
            with RunWriter(self._path, start) as writer:
                hearing = [loop.create_task(self._hear(sender, writer)) for sender in self._senders]
                tasks += hearing
                if self._progress is not None:
                    tasks.append(loop.create_task(self._show(self._progress)))
                await self._wait(hearing, feeding)
                return self._finish(writer)
        finally:
            if threading.current_thread() is threading.main_thread():
                for number in _CUTTING:
                    loop.remove_signal_handler(number)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_senders()

    async def _wait(self, hearing: list[asyncio.Task[None]], feeding: asyncio.Task[None]) -> None:
        """Waits for all senders; a fault of feeding them or of one of them ends the run."""
        pending: set[asyncio.Task[None]] = {*hearing, feeding}
        while any(task in pending for task in hearing):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _start_senders(self, count: int) -> None:
        concurrency = self._settings.concurrency
        for number in range(count):
            ours, theirs = socket.socketpair()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.bench.sender",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; they hear of it from here
            )
            theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours)
            share = 0
            if concurrency is not None:
                share = concurrency // count + (1 if number < concurrency % count else 0)
            sender = _Sender(process, reader, writer, share)
            self._senders.append(sender)
            sender.tell(
                Setup(
                    process=number,
                    settings=self._settings,
                    headers=self._headers,
                    concurrency=share if concurrency is not None else None,
                    num_open=share,
                )
            )
        for sender in self._senders:
            if not isinstance(await read_from_sender(sender.reader), Ready):
                raise MachineError(f"a sending process ended at its start (exit code {await sender.process.wait()})")

    async def _end_senders(self) -> None:
        for sender in self._senders:
            sender.writer.close()
            if sender.process.returncode is None and sender.done is None:
                sender.process.kill()
        await asyncio.gather(*(sender.process.wait() for sender in self._senders))

    async def _feed(self) -> None:
        """Hands out samples until the run has enough of them."""
        try:
            if self._settings.concurrency is None:
                await self._feed_open()
            else:
                await self._feed_closed()
            await self._flush()
            for sender in self._senders:
                sender.tell(NoMore())
        except ConnectionError:
            return  # that sender has ended: as it should, at the time limit, or ``_hear`` says so

    async def _flush(self) -> None:
        for sender in self._senders:
            await sender.flush()

    async def _feed_open(self) -> None:
        settings = self._settings
        times = None if settings.arrivals == "trace" else arrival_times(settings)
        limit_s = math.inf if settings.duration_s is None else settings.warmup_s + settings.duration_s
        num_measured = index = number = 0
        while settings.num_requests is None or num_measured < settings.num_requests:
            sample = next(self._samples, None)
            if sample is None:
                return
            at_s = next(times, math.inf) if times is not None else _trace_time(sample, settings)
            if at_s >= limit_s:
                return
            ahead_s = self._start_s + at_s - time.monotonic() - _AHEAD_S if self._start_s else at_s - _AHEAD_S
            if ahead_s > 0:
                await self._flush()
                await asyncio.sleep(ahead_s + _BATCH_S)
            if self._is_cut:
                return
            self._senders[number % len(self._senders)].hold(Work(index, sample, at_s))
            num_turns = 1 + len(sample.follow_ups)
            if index >= settings.warmup_requests and at_s >= settings.warmup_s:
                num_measured += num_turns
            index += num_turns
            number += 1
            if number % _MAX_HELD == 0:
                await self._flush()

    async def _feed_closed(self) -> None:
        settings = self._settings
        index = num_measured = number = 0
        while settings.num_requests is None or num_measured < settings.num_requests:
            sender = max(self._senders, key=lambda one: one.num_wanted)
            if sender.num_wanted <= 0:
                await self._flush()
                self._wants_more.clear()
                await self._wants_more.wait()
                continue
            sample = next(self._samples, None)
            if sample is None or self._is_cut:
                return
            sender.num_wanted -= 1
            sender.hold(Work(index, sample, None))
            number += 1
            if number % _MAX_HELD == 0:
                await self._flush()
            num_turns = 1 + len(sample.follow_ups)
            is_warm = not settings.warmup_s or (
                self._start_s > 0 and time.monotonic() >= self._start_s + settings.warmup_s
            )
            if index >= settings.warmup_requests and is_warm:
                num_measured += num_turns
            index += num_turns

    async def _hear(self, sender: _Sender, writer: RunWriter) -> None:
        while True:
            message = await read_from_sender(sender.reader)
            match message:
                case Pulse() as pulse:
                    self._take(sender, pulse, writer)
                case Done() as done:
                    sender.done = done
                    return
                case Ready():
                    raise AssertionError("said once, before the start")
                case None:
                    code = await sender.process.wait()
                    raise MachineError(f"a sending process ended unexpectedly (exit code {code})")

    def _take(self, sender: _Sender, pulse: Pulse, writer: RunWriter) -> None:
        if pulse.num_exchanges:
            writer.add(pulse.lines, pulse.num_exchanges)
        sender.num_in_flight = pulse.num_in_flight
        sender.num_wanted += pulse.num_samples
        if pulse.num_samples:
            self._wants_more.set()
        self._num_sent += pulse.num_sent
        self._num_ended += pulse.num_exchanges
        self._num_failed += pulse.num_failed
        self._num_warmup += pulse.num_warmup
        self._num_chunks += pulse.num_chunks
        self._output_tokens += pulse.output_tokens
        self._latest_s += pulse.latest_s
        if pulse.first_measured_s is not None:
            self._first_measured_s = min(self._first_measured_s, pulse.first_measured_s)

    def _cut(self) -> None:
        self._is_cut = True
        self._wants_more.set()
        for sender in self._senders:
            sender.tell(Cut())

    async def _show(self, progress: ProgressSink) -> None:
        while True:
            await asyncio.sleep(0.25)
            progress(self._snapshot())

    def _snapshot(self) -> Snapshot:
        settings = self._settings
        latest_s, self._latest_s = tuple(self._latest_s), []
        return Snapshot(
            elapsed_s=max(0.0, time.monotonic() - self._start_s),
            num_total=None if settings.num_requests is None else settings.num_requests + settings.warmup_requests,
            total_s=None if settings.duration_s is None else settings.warmup_s + settings.duration_s,
            num_sent=self._num_sent,
            num_ended=self._num_ended,
            num_failed=self._num_failed,
            num_in_flight=sum(sender.num_in_flight for sender in self._senders),
            num_chunks=self._num_chunks,
            output_tokens=self._output_tokens,
            latest_s=latest_s,
        )

    def _finish(self, writer: RunWriter) -> Run:
        if self._progress is not None:
            self._progress(self._snapshot())
        done = [sender.done for sender in self._senders if sender.done is not None]
        overhead = Overhead(
            processes=len(done),
            loop_lag=summarize_lags(lag for one in done for lag in one.lags_s),
            send_lag=summarize_lags(lag for one in done for lag in one.late_s),
            cpu_s=round(sum(one.cpu_s for one in done), 6),
            busiest_ratio=round(max(one.cpu_s / one.wall_s if one.wall_s else 0.0 for one in done), 4),
        )
        settings = self._settings
        measured_from_s = settings.warmup_s
        if settings.warmup_requests and math.isfinite(self._first_measured_s):
            measured_from_s = self._first_measured_s
        return writer.finish(
            duration_s=round(max(one.wall_s for one in done), 6),
            measured_from_s=round(measured_from_s, 6),
            is_partial=self._is_cut,
            overhead=overhead,
        )


def _trace_time(sample: Sample, settings: Settings) -> float:
    if sample.at_s is None:
        raise ConfigError(f"--arrivals trace: the sample of line {sample.line} has no time of its own")
    return sample.at_s / settings.trace_speed
