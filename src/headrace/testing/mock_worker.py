"""A stand-in for the engine: speaks the worker link, answers from a script, and fails where the script says.

What lives here: the script's types, the asyncio worker, and a ``main`` so that a supervisor can start it by its
module name. What does not: any model. Front, supervisor and clients are tested against it, so its frames are the
engine's very frames.

    unscripted           every request is answered with ``DEFAULT_TEXT``
    Script.replies[n]    answer to the n-th request that arrives; after the last one, ``Script.default``
    Reply.fault          what goes wrong when ``fault_at_token`` tokens of that reply have been sent
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from array import array
from collections.abc import Callable, Coroutine, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.base.errors import ProtocolError
from headrace.base.process import die_with_parent, read_inherited
from headrace.protocol.frames import (
    HEARTBEAT_INTERVAL_S,
    ID_BYTES,
    LINK_VERSION,
    Abort,
    Drain,
    EchoLogprobs,
    Encode,
    Encoded,
    Event,
    Failed,
    Finished,
    FinishReason,
    FrameReader,
    FromWorker,
    Hello,
    Started,
    Status,
    Step,
    Submit,
    TokenLogprobs,
    Tokens,
    ToWorker,
    Welcome,
    WorkerState,
    encode_frame,
)
from headrace.protocol.launch import WorkerLaunch

DEFAULT_TEXT = "The mill turns while the water runs."
_READ_BYTES = 2**16


class Fault(StrEnum):
    """What goes wrong.

    CRASH     the process ends at once (in process: every socket closes without a word)
    HANG      no request makes progress any more, heartbeats go on with the same step count
    FREEZE    nothing is read or sent any more, the sockets stay open
    NAN       this request fails with ``numerical_error``
    REFUSE    this request fails with ``queue_full`` before it starts
    """

    CRASH = "crash"
    HANG = "hang"
    FREEZE = "freeze"
    NAN = "nan"
    REFUSE = "refuse"


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer one request.

    Args:
        text: what to say; encoded with the worker's ``encode``.
        ids: token ids to say instead of ``text``.
        time_to_first_token_s: wait before the first token.
        inter_token_s: wait before each further token.
        fault, fault_at_token: what goes wrong, after how many sent tokens (or vectors).
        hold_at_token: after this many tokens (or vectors) wait for ``MockWorker.release``; None never waits.
        cached_tokens: prompt tokens to report as found in the prefix cache.
    """

    text: str = DEFAULT_TEXT
    ids: list[int] | None = None
    time_to_first_token_s: float = 0.0
    inter_token_s: float = 0.0
    fault: Fault | None = None
    fault_at_token: int = 0
    hold_at_token: int | None = None
    cached_tokens: int = 0


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the worker behaves.

    Args:
        loading_s: None loads until ``MockWorker.finish_loading`` is called.
        vector_width: elements of a vector; 0 is a model that generates.
    """

    replies: list[Reply] = []
    default: Reply = Reply()
    loading_s: float | None = 0.0
    max_running: int = 32
    queue_limit: int = 4096
    context_tokens: int = 4096
    vocab_size: int = 2**17
    eos_token_ids: tuple[int, ...] = (2,)
    model_digest: str = "mock"
    total_blocks: int = 128
    predicted_step_s: float = 0.01
    vector_width: int = 0


def encode_bytes(text: str) -> list[int]:
    """Returns the text's UTF-8 bytes as token ids: the fallback where no tokenizer is given."""
    return list(text.encode())


class _Peer:
    """One connection: its socket streams and its running requests."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.requests: dict[str, asyncio.Task[None]] = {}
        self.started: set[str] = set()

    def send(self, frame: FromWorker) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode_frame(frame))

    def send_events(self, *events: Event) -> None:
        self.send(Step(list(events)))


class MockWorker:
    """The mock worker as an object: start it on a socket, read what it received, release what it holds.

    Args:
        script: how to behave.
        encode: turns a reply's text into token ids; UTF-8 bytes by default.
        die: called on ``Fault.CRASH`` after the sockets closed; ``main`` ends the process with it.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        encode: Callable[[str], list[int]] = encode_bytes,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.script = script or Script()
        self.received: list[Submit | Encode] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.state = WorkerState.LOADING
        self._encode = encode
        self._die = die
        self._peers: set[_Peer] = set()
        self._server: asyncio.Server | None = None
        self._slots = asyncio.Semaphore(self.script.max_running)
        self._num_running = 0
        self._released = asyncio.Event()
        self._loaded = asyncio.Event()
        self._moving = asyncio.Event()  # cleared by HANG and FREEZE: nobody steps any more
        self._moving.set()
        self._is_frozen = False
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Requests that have left the queue and not ended."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return sum(len(peer.requests) for peer in self._peers) - self._num_running

    async def start(self, listener: socket.socket | Path | str) -> None:
        """Listens on a bound Unix socket, or on a path that it binds."""
        if isinstance(listener, socket.socket):
            self._server = await asyncio.start_unix_server(self._serve_peer, sock=listener)
        else:
            self._server = await asyncio.start_unix_server(self._serve_peer, path=str(listener))
        self._spawn(self._beat())
        if self.script.loading_s == 0.0:
            self.finish_loading()
        elif self.script.loading_s is not None:
            self._spawn(self._load(self.script.loading_s))

    async def stop(self) -> None:
        """Closes the listener and every connection, and ends all tasks."""
        self.crash()
        if self._server is not None:
            await self._server.wait_closed()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def crash(self) -> None:
        """Closes everything without a word, as a killed process does."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.writer.transport.abort()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def release(self) -> None:
        """Lets every held reply go on, now and later."""
        self._released.set()

    def finish_loading(self) -> None:
        """Turns ready, and says so."""
        if self.state is WorkerState.LOADING:
            self.state = WorkerState.READY
            self._loaded.set()
            self._send_status()

    def hang(self) -> None:
        """Stops stepping; heartbeats go on."""
        self._moving.clear()

    def freeze(self) -> None:
        """Stops reading, sending and stepping; the sockets stay open."""
        self._is_frozen = True
        self._moving.clear()

    def thaw(self) -> None:
        """Ends a hang or a freeze."""
        self._is_frozen = False
        self._moving.set()

    def status(self) -> Status:
        """Returns the heartbeat as it would be sent now."""
        used = min(self.script.total_blocks, self._num_running)
        return Status(
            state=self.state,
            num_steps=self.num_steps,
            num_running=self._num_running,
            num_waiting=self.num_waiting,
            free_blocks=self.script.total_blocks - used,
            evictable_blocks=0,
            total_blocks=self.script.total_blocks,
            predicted_step_s=self.script.predicted_step_s,
            progress_ratio=0.0 if self.state is WorkerState.LOADING else 1.0,
            stage="loading the mock" if self.state is WorkerState.LOADING else "",
            prefill_tokens_per_s=1000.0,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _send_status(self) -> None:
        if not self._is_frozen:
            for peer in self._peers:
                peer.send(self.status())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S / 2)
            self._send_status()

    async def _load(self, loading_s: float) -> None:
        await asyncio.sleep(loading_s)
        self.finish_loading()

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(writer)
        frames = FrameReader(ToWorker)
        has_greeted = False
        try:
            while data := await reader.read(_READ_BYTES):
                if self._is_frozen:
                    await self._moving.wait()
                for frame in frames.feed(data):
                    match frame:
                        case Hello():
                            if frame.version != LINK_VERSION:
                                return
                            has_greeted = True
                            self._peers.add(peer)
                            self._greet(peer)
                        case _ if not has_greeted:
                            return
                        case Submit() | Encode():
                            self._submit(peer, frame)
                        case Abort():
                            self._abort(peer, frame.request_id)
                        case Drain():
                            self.state = WorkerState.DRAINING
                            self._send_status()
        except (ProtocolError, ConnectionError, asyncio.CancelledError):
            pass  # the peer is gone, or spoke nonsense: like the engine, close the connection
        finally:
            self._peers.discard(peer)
            for task in peer.requests.values():
                task.cancel()
            writer.close()

    def _greet(self, peer: _Peer) -> None:
        script = self.script
        peer.send(
            Welcome(
                version=LINK_VERSION,
                pid=os.getpid(),
                model_digest=script.model_digest,
                context_tokens=script.context_tokens,
                vocab_size=script.vocab_size,
                eos_token_ids=list(script.eos_token_ids),
                vector_width=script.vector_width,
            )
        )
        peer.send(self.status())

    def _submit(self, peer: _Peer, request: Submit | Encode) -> None:
        index = len(self.received)
        self.received.append(request)
        reply = self.script.replies[index] if index < len(self.script.replies) else self.script.default
        refusal = self._refusal(request, reply)
        if refusal is not None:
            peer.send_events(Failed(request.request_id, refusal[0], refusal[1], has_started=False))
            return
        task = self._spawn(self._run(peer, request, reply))
        peer.requests[request.request_id] = task
        task.add_done_callback(lambda done: self._reap(peer, request, done))

    def _reap(self, peer: _Peer, request: Submit | Encode, task: asyncio.Task[None]) -> None:
        """Forgets an ended request; one that was cancelled before its task ran a line still gets its answer."""
        peer.requests.pop(request.request_id, None)
        if task.cancelled():
            now_s = asyncio.get_running_loop().time()
            peer.send_events(_Run(request, now_s).finish(FinishReason.ABORTED, now_s, 0))

    def _refusal(self, request: Submit | Encode, reply: Reply) -> tuple[str, str] | None:
        if self.state is WorkerState.LOADING:
            return "model_loading", "the model is still loading: try again later"
        if self.state is WorkerState.DRAINING:
            return "draining", "the worker is draining: try another"
        if reply.fault is Fault.REFUSE or self.num_waiting >= self.script.queue_limit:
            return "queue_full", f"queue of {self.script.queue_limit} requests is full: try again later"
        if isinstance(request, Submit) and len(request.prompt_ids) >= self.script.context_tokens:
            count, limit = len(request.prompt_ids), self.script.context_tokens
            return "context_length_exceeded", f"prompt has {count} tokens, the maximum context length is {limit}"
        return None

    def _abort(self, peer: _Peer, request_id: str) -> None:
        task = peer.requests.get(request_id)
        if task is not None and not self._is_frozen:
            self.aborted.append(request_id)
            task.cancel()

    async def _run(self, peer: _Peer, request: Submit | Encode, reply: Reply) -> None:
        clock = asyncio.get_running_loop().time
        received_at_s = clock()
        run = _Run(request, received_at_s)
        try:
            async with asyncio.timeout(request.timeout_s), self._slots:
                self._num_running += 1
                try:
                    match request:
                        case Submit():
                            await self._generate(peer, request, reply, run, clock)
                        case Encode():
                            await self._encode_inputs(peer, request, reply, run, clock)
                finally:
                    self._num_running -= 1
        except TimeoutError:
            message = f"the request ran out of its {request.timeout_s} s"
            run.ending = Failed(request.request_id, "generation_timeout", message, has_started=run.has_started)
        except asyncio.CancelledError:
            run.ending = run.finish(FinishReason.ABORTED, clock(), reply.cached_tokens)
        peer.requests.pop(request.request_id, None)
        if run.ending is not None:
            peer.send_events(run.ending)

    async def _generate(
        self, peer: _Peer, request: Submit, reply: Reply, run: _Run, clock: Callable[[], float]
    ) -> None:
        """Sends the reply's tokens; leaves how it ended in ``run.ending`` (None when the worker died)."""
        await self._moving.wait()
        run.started_at_s = clock()
        self._prompt_tokens += len(request.prompt_ids)
        peer.send_events(Started(request.request_id, reply.cached_tokens))
        ids = self._encode(reply.text) if reply.ids is None else reply.ids
        stop_ids = {*request.stop_token_ids, *([] if request.ignore_eos else self.script.eos_token_ids)}
        if request.echo_logprobs is not None and len(request.prompt_ids) > 1:
            scores = [_logprobs(token, request.echo_logprobs) for token in request.prompt_ids[1:]]
            peer.send_events(EchoLogprobs(request.request_id, 1, scores))
        room = min(request.max_tokens, self.script.context_tokens - len(request.prompt_ids))
        for token in _tokens(ids, is_endless=request.ignore_eos or request.min_tokens > len(ids)):
            if reply.hold_at_token == run.output_tokens:
                await self._released.wait()
            if reply.fault is not None and run.output_tokens == reply.fault_at_token:
                self._fault(reply.fault, run)
            if run.has_failed:
                return
            await self._moving.wait()
            is_end = token is None or (token in stop_ids and run.output_tokens >= request.min_tokens)
            if is_end or run.output_tokens >= room:
                reason = FinishReason.STOP if is_end else FinishReason.LENGTH
                stop_id = self.script.eos_token_ids[0] if token is None else token
                run.ending = run.finish(reason, clock(), reply.cached_tokens, stop_id if is_end else None)
                return
            wait_s = reply.inter_token_s if run.output_tokens else reply.time_to_first_token_s
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)
            await self._moving.wait()
            assert token is not None
            run.first_token_at_s = run.first_token_at_s or clock()
            run.output_tokens += 1
            self.num_steps += 1
            self._generated_tokens += 1
            num_top = request.sampling.num_logprobs
            scores = [] if num_top is None else [_logprobs(token, num_top)]
            peer.send_events(Tokens(request.request_id, [token], scores))
            await asyncio.sleep(0)

    async def _encode_inputs(
        self, peer: _Peer, request: Encode, reply: Reply, run: _Run, clock: Callable[[], float]
    ) -> None:
        """Sends a vector for each input: its first tokens as numbers."""
        await self._moving.wait()
        run.started_at_s = clock()
        self._prompt_tokens += run.prompt_tokens
        peer.send_events(Started(request.request_id, 0))
        width = request.dimensions or self.script.vector_width
        for index, ids in enumerate(request.inputs):
            if reply.hold_at_token == index:
                await self._released.wait()
            if reply.fault is not None and index == reply.fault_at_token:
                self._fault(reply.fault, run)
            if run.has_failed:
                return
            await self._moving.wait()
            numbers = array("i", ids)[:width]
            vector = array("f", [*numbers, *[0.0] * (width - len(numbers))])
            self.num_steps += 1
            peer.send_events(Encoded(request.request_id, index, vector.tobytes()))
            await asyncio.sleep(0)
        run.ending = run.finish(FinishReason.STOP, clock(), 0)

    def _fault(self, fault: Fault, run: _Run) -> None:
        match fault:
            case Fault.CRASH:
                self.crash()
                if self._die is not None:
                    self._die()
                run.has_failed = True
            case Fault.HANG:
                self.hang()
            case Fault.FREEZE:
                self.freeze()
            case Fault.NAN:
                message = f"the model produced a value that is not a number at output token {run.output_tokens}"
                run.ending = Failed(run.request.request_id, "numerical_error", message, has_started=True)
                run.has_failed = True
            case Fault.REFUSE:
                pass  # refused before it started


class _Run:
    """Progress of one request."""

    def __init__(self, request: Submit | Encode, received_at_s: float) -> None:
        self.request = request
        self.received_at_s = received_at_s
        self.started_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.output_tokens = 0
        self.has_failed = False
        self.ending: Finished | Failed | None = None

    @property
    def has_started(self) -> bool:
        return self.started_at_s is not None

    @property
    def prompt_tokens(self) -> int:
        match self.request:
            case Submit():
                return len(self.request.prompt_ids)
            case Encode():
                return sum(map(len, self.request.inputs)) // ID_BYTES

    def finish(
        self, reason: FinishReason, now_s: float, cached_tokens: int, stop_token_id: int | None = None
    ) -> Finished:
        started_at_s = now_s if self.started_at_s is None else self.started_at_s
        first_at_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        num_top = self.request.sampling.num_logprobs if isinstance(self.request, Submit) else None
        return Finished(
            request_id=self.request.request_id,
            reason=reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=self.output_tokens,
            queue_s=started_at_s - self.received_at_s,
            prefill_s=first_at_s - started_at_s,
            decode_s=now_s - first_at_s,
            stop_token_id=stop_token_id,
            stop_logprobs=None if num_top is None or stop_token_id is None else _logprobs(stop_token_id, num_top),
        )


def _tokens(ids: list[int], *, is_endless: bool) -> Iterable[int | None]:
    """Yields the ids; then None for the end of text, or (endless) the ids again and again."""
    while True:
        yield from ids
        if not is_endless or not ids:
            yield None
            return


def _logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Returns made-up, well-formed log-probabilities: the token first, its neighbours behind it."""
    return TokenLogprobs(-0.5, [token + i for i in range(num_top)], [-0.5 - i for i in range(num_top)])


def _load_encode(model_path: Path) -> Callable[[str], list[int]]:
    """Returns the encoder of the model's own tokenizer where the folder has one, else bytes."""
    tokenizer_file = model_path / "tokenizer.json"
    if not tokenizer_file.is_file():
        return encode_bytes
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode


async def _serve(launch: WorkerLaunch, script: Script) -> None:
    worker = MockWorker(script, encode=_load_encode(Path(launch.model_path)), die=lambda: os._exit(1))
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    listener = socket.socket(fileno=launch.socket_fd)
    listener.setblocking(False)
    async with worker:
        await worker.start(listener)
        parent_pid = os.getppid()
        while not stopped.is_set() and os.getppid() == parent_pid:
            try:
                await asyncio.wait_for(stopped.wait(), timeout=1.0)
            except TimeoutError:
                continue


def main(arguments: list[str] | None = None) -> int:
    """Runs the mock worker as a process: ``--launch-fd N [--script FILE]``."""
    parser = argparse.ArgumentParser(prog="headrace.testing.mock_worker")
    parser.add_argument("--launch-fd", type=int, required=True)
    parser.add_argument("--script", type=Path)
    options = parser.parse_args(arguments)
    die_with_parent()
    launch = msgspec.json.decode(read_inherited(options.launch_fd), type=WorkerLaunch)
    script = Script() if options.script is None else msgspec.json.decode(options.script.read_bytes(), type=Script)
    asyncio.run(_serve(launch, script))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
