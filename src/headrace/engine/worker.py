"""The worker process: one model, one thread that serves the link and runs the steps.

    python -m headrace.engine.worker --launch-fd N

Life: inspect the model (wrong ones end the process here, with one line and their exit code) → serve the link while
the weights load in a second thread → ready → step while there is work, sleep in ``poll`` while there is none →
SIGTERM drains → end. Between two steps everything that arrived is taken and everything that happened is sent: one Step
frame per peer and step. Several decode steps of a small model in a row are one step here, unless something arrives
(``policy.burst``). A worker that loses its parent is killed by the kernel.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.base.clock import Clock, SystemClock
from headrace.base.errors import EngineError, HeadraceError
from headrace.base.exits import Exit, exit_code_of
from headrace.base.log import get_log, setup_log
from headrace.base.process import die_with_parent, read_inherited
from headrace.engine.encode_scheduler import EncodeScheduler
from headrace.engine.gate import Gate
from headrace.engine.grammars import Grammars
from headrace.engine.link import Link, Request
from headrace.engine.loader import Inspection, Loaded, inspect, load
from headrace.engine.scheduler import Scheduler
from headrace.engine.work import WorkPlan, WorkScheduler
from headrace.policy.burst import burst_steps
from headrace.policy.turns import LOOK_S
from headrace.protocol.frames import (
    HEARTBEAT_INTERVAL_S,
    LINK_VERSION,
    Abort,
    Drain,
    Encode,
    Failed,
    Status,
    Step,
    Submit,
    Welcome,
    WorkerState,
)
from headrace.protocol.launch import WorkerLaunch
from headrace.registry.model import open_model
from headrace.text.grammar import GrammarVocabulary

# Sent a little early, because a step may come in between.
_BEAT_S = 0.8 * HEARTBEAT_INTERVAL_S
# A step that fails is blamed on its requests; this many in a row are blamed on us, and a fresh process takes over.
_MAX_FAILED_STEPS = 3
_OUT_OF_MEMORY = "engine_out_of_memory"

log = get_log(__name__)


class Worker:
    """The loop. ``loading`` is called in a thread and returns the loaded model.

    Args:
        inspection: what is to be served.
        link: where peers are.
        loading: loads the model; gets a progress callback.
        gate: where steps wait for their turn when other models share the threads.
    """

    def __init__(
        self,
        inspection: Inspection,
        link: Link,
        clock: Clock,
        loading: Callable[[Callable[[str, float], None]], Loaded],
        gate: Gate | None = None,
    ) -> None:
        self._inspection = inspection
        self._link = link
        self._clock = clock
        self._loading = loading
        self._gate = gate
        self._is_at_gate = False
        self._step_s = 0.0
        if gate is not None:
            link.watch(gate.wake_fd)
        self._generating: Scheduler | None = None
        self._encoding: EncodeScheduler | None = None
        if inspection.encode_config is None:
            self._generating = Scheduler(inspection.scheduler_config)
        else:
            self._encoding = EncodeScheduler(inspection.encode_config)
        self._scheduler: WorkScheduler = self._generating or self._encoding  # type: ignore[assignment]  # one of them is there
        self._grammars = Grammars(lambda: _vocabulary(inspection), link.wake)
        self._loaded: Loaded | None = None
        self._load_error: BaseException | None = None
        self._stage = ("opening the model", 0.0)
        self._num_stop_signals = 0
        self._is_draining = False
        self._num_failed_steps = 0
        self._next_beat_s = 0.0

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life."""
        if self._is_draining:
            return WorkerState.DRAINING
        return WorkerState.LOADING if self._loaded is None else WorkerState.READY

    @property
    def is_loading(self) -> bool:
        """Whether the loading thread has not ended."""
        return self._loaded is None and self._load_error is None

    def request_stop(self) -> None:
        """Finishes what runs and ends; called again, ends at once. Safe in a signal handler."""
        self._num_stop_signals += 1
        self._link.wake()

    def run(self) -> Exit:
        """Serves until it is told to stop; returns the process's exit code.

        Raises:
            HeadraceError: the model could not be loaded.
        """
        self._load()
        while not self._must_end():
            self._serve(self._poll_timeout_s())
            if self._loaded is not None and self._has_turn():
                is_contended = self._gate is not None and self._gate.is_contended
                max_steps = 1 if is_contended else burst_steps(self._loaded.pace.decode_step_s)
                plan = self._scheduler.plan(self._clock.now_s(), max_steps)
                self._send_events()  # Started goes out before the step, so a queue timer stops in time
                if plan is not None:
                    self._run_step(self._loaded, plan)
                    self._send_events()
                elif self._gate is not None:
                    self._gate.rest()
            if self._num_failed_steps >= _MAX_FAILED_STEPS:
                self._scheduler.fail_all(EngineError.code, "the engine failed several steps in a row and restarts")
                self._send_events()
                return Exit.BAD
            self._beat()
        return Exit.GOOD

    # --- loading --------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Serves the link until the model is there; everything that is asked meanwhile is refused, politely."""
        thread = threading.Thread(target=self._load_in_thread, name="load", daemon=True)
        thread.start()
        log.info("model_loading", model=self._inspection.launch.served_name, size_bytes=self._inspection.weight_bytes)
        while thread.is_alive() and not self._num_stop_signals:
            self._serve(0.25 * HEARTBEAT_INTERVAL_S)
            self._beat()
        if self._load_error is not None:
            raise self._load_error
        self._next_beat_s = 0.0  # say "ready" at once
        self._beat()
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections need not look at it

    def _load_in_thread(self) -> None:
        def note(stage: str, ratio: float) -> None:
            self._stage = (stage, ratio)

        try:
            self._loaded = self._loading(note)
        except BaseException as error:  # noqa: BLE001  # handed to the main thread, which raises it
            self._load_error = error
        self._link.wake()

    # --- one turn -------------------------------------------------------------------------------------------------

    def _must_end(self) -> bool:
        if self._num_stop_signals and not self._is_draining:
            self._is_draining = True
            log.info("drain_started", num_running=self._scheduler.num_running)
            self._next_beat_s = 0.0
        return self._num_stop_signals > 1 or (
            self._num_stop_signals == 1 and not self._scheduler.has_work and not self._grammars.num_pending
        )

    def _poll_timeout_s(self) -> float:
        until_beat_s = max(0.0, self._next_beat_s - self._clock.now_s())
        if not self._scheduler.has_work:
            return until_beat_s
        return min(LOOK_S, until_beat_s) if self._is_at_gate else 0.0

    def _has_turn(self) -> bool:
        """Whether a step may begin now; where other models share the threads, it may be another's turn."""
        if self._gate is None:
            return True
        if not self._scheduler.has_work or self._loaded is None:
            self._gate.rest()
            return True
        self._is_at_gate = not self._gate.enter(self._loaded.pace.predicted_step_s)
        return not self._is_at_gate

    def _serve(self, timeout_s: float) -> None:
        requests = self._link.poll(timeout_s)
        for peer_id in self._link.take_greeted():
            self._link.send(peer_id, self._welcome())
            self._link.send(peer_id, self._status())
        for peer_id, request in requests:
            self._take(peer_id, request)
        for peer_id in self._link.take_gone():
            self._scheduler.abort_owner(peer_id)
            self._grammars.abort_owner(peer_id)
        for ready in self._grammars.take():
            if ready.failed is not None:
                self._link.send(ready.owner, Step([ready.failed]))
            else:
                assert self._generating is not None, "only what generates has grammars"
                self._generating.submit(ready.owner, ready.submit, ready.arrived_at_s, ready.state)
        self._send_events()

    def _take(self, peer_id: int, request: Request) -> None:
        match request:
            case Submit() | Encode():
                refusal = self._refusal(request)
                request_id = request.request_id
                if self._scheduler.has_request(peer_id, request_id) or self._grammars.has_request(peer_id, request_id):
                    self._link.cut(peer_id, "a request id is in use already")
                elif refusal is not None:
                    code, message = refusal
                    failed = Failed(request.request_id, code, message, has_started=False)
                    self._link.send(peer_id, Step([failed]))
                else:
                    self._start(peer_id, request)
            case Abort():
                aborted = self._grammars.abort(peer_id, request.request_id)
                if aborted is not None:
                    self._link.send(peer_id, Step([aborted]))
                self._scheduler.abort(peer_id, request.request_id, self._clock.now_s())
            case Drain():
                self._is_draining = True
                self._next_beat_s = 0.0

    def _start(self, peer_id: int, request: Submit | Encode) -> None:
        now_s = self._clock.now_s()
        match request:
            case Encode():
                assert self._encoding is not None, "refused before"
                self._encoding.submit(peer_id, request, now_s)
            case Submit(grammar=None):
                assert self._generating is not None, "refused before"
                self._generating.submit(peer_id, request, now_s)
            case Submit():
                self._grammars.start(peer_id, request, now_s)

    def _refusal(self, request: Submit | Encode) -> tuple[str, str] | None:
        if isinstance(request, Encode) and self._encoding is None:
            return "invalid_value", "this model generates text and makes no vectors"
        if isinstance(request, Submit) and self._generating is None:
            return "invalid_value", "this model makes vectors and generates no text"
        match self.state:
            case WorkerState.LOADING:
                return "model_loading", "the model is still loading: try again in a moment"
            case WorkerState.DRAINING:
                return "draining", "the worker is draining: try another"
            case WorkerState.READY:
                return None

    def _run_step(self, loaded: Loaded, plan: WorkPlan) -> None:
        num_threads = loaded.threads.choose(plan.num_rows)
        started_at_s = self._clock.now_s()
        num_before = self._scheduler.totals.steps
        try:
            loaded.vm.use_threads(num_threads)
            result = loaded.executor.run(plan)
            now_s = self._clock.now_s()
            self._scheduler.complete(plan, result, now_s)
        except MemoryError:
            self._num_failed_steps += 1
            log.error("engine_error", error=_OUT_OF_MEMORY, num_rows=plan.num_rows)
            self._scheduler.fail_step(plan, _OUT_OF_MEMORY, "the engine ran out of memory in this step: try again")
        except Exception:  # the engine loop's edge: a bug fails the step's requests, not the worker
            self._num_failed_steps += 1
            log.exception("engine_error", num_rows=plan.num_rows, reason=plan.reason)
            self._scheduler.fail_step(plan, EngineError.code, "the engine failed in this step; see the worker's log")
        else:
            self._num_failed_steps = 0
            self._step_s += now_s - started_at_s
            step_s = (now_s - started_at_s) / max(1, self._scheduler.totals.steps - num_before)
            loaded.pace.observe(plan.num_rows, step_s)
            loaded.threads.observe(plan.num_rows, num_threads, step_s)
        if self._gate is not None:
            self._gate.leave()

    def _send_events(self) -> None:
        for peer_id, events in self._scheduler.take_events().items():
            self._link.send(peer_id, Step(events))

    def _beat(self) -> None:
        now_s = self._clock.now_s()
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + _BEAT_S
            self._link.send_all([self._status()])

    # --- what peers hear ------------------------------------------------------------------------------------------

    def _welcome(self) -> Welcome:
        inspection = self._inspection
        return Welcome(
            version=LINK_VERSION,
            pid=os.getpid(),
            model_digest=inspection.files.digest,
            context_tokens=inspection.pool.context_tokens,
            vocab_size=inspection.spec.vocab_size,
            eos_token_ids=list(inspection.spec.eos_token_ids),
            vector_width=0 if inspection.encode_config is None else inspection.encode_config.width,
            forms=[] if inspection.encode_config is None else list(inspection.encode_config.forms),
            labels=list(inspection.spec.labels),
        )

    def _status(self) -> Status:
        scheduler, totals = self._scheduler, self._scheduler.totals
        pace = self._loaded.pace if self._loaded is not None else None
        stage, ratio = self._stage
        return Status(
            state=self.state,
            num_steps=totals.steps,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self._grammars.num_pending,
            free_blocks=scheduler.pool.num_free,
            evictable_blocks=scheduler.pool.num_evictable,
            total_blocks=scheduler.pool.total,
            # Neighbours' turns lie between ours: nobody shall take that for a hang.
            predicted_step_s=pace.predicted_step_s * (self._gate.slowdown if self._gate else 1.0) if pace else 0.0,
            progress_ratio=1.0 if pace else ratio,
            stage="" if pace else stage,
            prefill_tokens_per_s=pace.prefill_tokens_per_s if pace else 0.0,
            num_preemptions=totals.preemptions,
            prefix_queries_tokens=totals.prefix_queries_tokens,
            prefix_hits_tokens=totals.prefix_hits_tokens,
            prompt_tokens_total=totals.prompt_tokens,
            generation_tokens_total=totals.generation_tokens,
            step_seconds_total=self._step_s,
            turn_seconds_total=0.0 if self._gate is None else self._gate.held_s,
            turn_wait_seconds_total=0.0 if self._gate is None else self._gate.waited_s,
        )


def _vocabulary(inspection: Inspection) -> GrammarVocabulary:
    """Reads the model's tokenizer, for grammars; the engine itself opened the model without."""
    from headrace.text.tokenizer import Tokenizer  # late: most workers never see a grammar

    files = open_model(Path(inspection.launch.model_path))
    is_gguf = files.kind == "gguf"
    tokenizer = Tokenizer.from_gguf(files.metadata) if is_gguf else Tokenizer.from_files(files.tokenizer_files)
    vocab_size = inspection.spec.vocab_size
    return GrammarVocabulary(
        [tokenizer.token_bytes(index) for index in range(min(tokenizer.vocab_size, vocab_size))],
        sorted(index for index in tokenizer.special_ids if index < vocab_size),
        sorted(inspection.spec.eos_token_ids),
        vocab_size,
        lambda text: tokenizer.encode(text, add_special=False),
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs a worker process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="headrace.engine.worker")
    parser.add_argument("--launch-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    die_with_parent()
    launch = msgspec.json.decode(read_inherited(options.launch_fd), type=WorkerLaunch)
    setup_log(launch.log_level, is_json=launch.is_log_json)
    clock = SystemClock()
    try:
        inspection = inspect(launch)
        link = Link(socket.socket(fileno=launch.socket_fd))
        gate = None if launch.gate is None else Gate(launch.gate, clock)
        worker = Worker(
            inspection, link, clock, lambda progress: load(inspection, clock, progress, wake_fd=link.ready_fd), gate
        )
        _handle_signals(worker, link)
        started_at_s = clock.now_s()
        log.info("worker_started", pid=os.getpid(), model=launch.served_name)
        code = worker.run()
        link.close()
        if gate is not None:
            gate.close()
        log.info("worker_stopped", exit_code=int(code), lived_s=round(clock.now_s() - started_at_s, 3))
        if worker.is_loading:
            os._exit(code)  # told to stop while loading: the thread is deep in native code and cannot be asked
    except HeadraceError as error:
        sys.stderr.write(f"{error.message}\n" if error.hint is None else f"{error.message} ({error.hint})\n")
        return int(exit_code_of(error))
    except MemoryError:
        sys.stderr.write("the memory of this machine ran out while the model was loaded\n")
        return int(Exit.MACHINE)
    return int(code)


def _handle_signals(worker: Worker, link: Link) -> None:
    signal.set_wakeup_fd(link.wake_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.request_stop())


if __name__ == "__main__":
    raise SystemExit(main())
