"""Grammars of a worker: compiled beside the steps, never in their way.

A request with a grammar waits here until its grammar is compiled, then the scheduler gets it. The vocabulary is
loaded when the first grammar arrives. Compiled grammars are kept for the next request with the same source, so ``n``
choices cost one compilation. The front has tried each grammar in a process of its own before it comes here, so that
one which crashes the compiler or takes for ever does not reach the worker.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.base.errors import EngineError, RequestError
from headrace.base.log import get_log
from headrace.protocol.frames import Failed, Finished, FinishReason, Grammar, Submit
from headrace.text.grammar import GrammarState, GrammarVocabulary

_MAX_KEPT: Final = 64
# Compiling recurses deeper than a thread's stack of 8 MiB allows where the front's check, on that much, still passes.
_STACK_BYTES: Final = 64 * 2**20

log = get_log(__name__)


class Ready(NamedTuple):
    """A request whose grammar is compiled, or could not be (then ``state`` is None and ``failed`` says why)."""

    owner: int
    submit: Submit
    arrived_at_s: float
    state: GrammarState | None
    failed: Failed | None


class Grammars:
    """Compiles in one thread of its own, started with the first grammar.

    Args:
        load_vocabulary: reads the model's tokenizer; called once, in the thread.
        wake: called from the thread when something is ready to be taken.
    """

    def __init__(self, load_vocabulary: Callable[[], GrammarVocabulary], wake: Callable[[], None]) -> None:
        self._load_vocabulary = load_vocabulary
        self._wake = wake
        self._jobs: queue.SimpleQueue[tuple[int, Submit, float]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Ready] = queue.SimpleQueue()
        self._pending: set[tuple[int, str]] = set()
        self._thread: threading.Thread | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self._kept: OrderedDict[Grammar, GrammarState] = OrderedDict()

    @property
    def num_pending(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._pending)

    def has_request(self, owner: int, request_id: str) -> bool:
        """Whether this request waits here."""
        return (owner, request_id) in self._pending

    def start(self, owner: int, submit: Submit, now_s: float) -> None:
        """Takes a request with a grammar; ``take`` gives it back."""
        assert submit.grammar is not None
        if self._thread is None:
            before = threading.stack_size(_STACK_BYTES)
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        self._pending.add((owner, submit.request_id))
        self._jobs.put((owner, submit, now_s))

    def take(self) -> list[Ready]:
        """Gives the requests that are done here and were not aborted meanwhile."""
        ready: list[Ready] = []
        while True:
            try:
                item = self._done.get_nowait()
            except queue.Empty:
                return ready
            key = (item.owner, item.submit.request_id)
            if key in self._pending:
                self._pending.remove(key)
                ready.append(item)

    def abort(self, owner: int, request_id: str) -> Finished | None:
        """Gives up a request that waits here; returns the event that ends it, None where there is none such."""
        if (owner, request_id) not in self._pending:
            return None
        self._pending.remove((owner, request_id))
        return Finished(request_id, FinishReason.ABORTED, 0, 0, 0, queue_s=0.0, prefill_s=0.0, decode_s=0.0)

    def abort_owner(self, owner: int) -> None:
        """Gives up all requests of a peer that is gone."""
        self._pending = {key for key in self._pending if key[0] != owner}

    def _work(self) -> None:
        while True:
            owner, submit, arrived_at_s = self._jobs.get()
            state: GrammarState | None = None
            failed: Failed | None = None
            if (owner, submit.request_id) in self._pending:
                try:
                    state = self._state(submit)
                except RequestError as error:
                    failed = Failed(submit.request_id, error.stable_code, error.message, has_started=False)
                except Exception:  # the thread's edge: a bug fails one request
                    log.exception("engine_error", reason="grammar")
                    failed = Failed(
                        submit.request_id, EngineError.code, "the engine failed this grammar", has_started=False
                    )
            self._done.put(Ready(owner, submit, arrived_at_s, state, failed))
            self._wake()

    def _state(self, submit: Submit) -> GrammarState:
        assert submit.grammar is not None
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        kept = self._kept.get(submit.grammar)
        if kept is None:
            kept = GrammarState.build(submit.grammar, self._vocabulary)
            self._kept[submit.grammar] = kept
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(submit.grammar)
        return kept.copy()
