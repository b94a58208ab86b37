"""The pipeline of one model in a front: its parts, its limits, and the requests that are open in it.

What one request does here is ``gateway.run``'s (text) and ``gateway.encoding``'s (vectors and scores); what all of them
hold is ``gateway.ticket``'s, which this module does not know.
"""

from __future__ import annotations

import itertools
import random
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.base.clock import Clock
from headrace.base.errors import (
    DeadlineError,
    EngineError,
    HeadraceError,
    NumericalError,
    OverloadedError,
    RequestError,
)
from headrace.gateway.admission import Admission
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.grammars import GrammarGate
from headrace.gateway.ledger import Ledger, Record
from headrace.gateway.quarantine import Quarantine
from headrace.gateway.render import Renderer, TextKit
from headrace.protocol.frames import Failed, Welcome
from headrace.protocol.launch import Kind
from headrace.replica.port import Readiness, Replica


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and time-outs of a model in a front; see ``protocol.launch.ModelLaunch``."""

    max_concurrent_requests: int = 512
    max_queued_requests: int = 512
    default_completion_tokens: int = 16
    default_chat_tokens: int = 4096
    queue_timeout_s: float = 30.0
    first_token_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    max_context_tokens: int | None = None


class OpenRequest(Protocol):
    """A request that is inside a front, as its pipeline sees it."""

    record: Record
    is_stream: bool
    is_submitted: bool

    def fail(self, error: HeadraceError) -> None:
        """Ends it from outside."""


class Pipeline:
    """Runs requests of one model on one replica.

    Args:
        served_names: names that a request may use; the first is the canonical one.
        kind: what the model gives, by its files; known before its worker is.
        chance: seeds unseeded requests and spreads retries; injected so that tests repeat.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        kit: TextKit,
        renderer: Renderer,
        grammars: GrammarGate,
        deadlines: Deadlines,
        ledger: Ledger,
        clock: Clock,
        limits: Limits,
        served_names: Sequence[str],
        kind: Kind = Kind.GENERATE,
        chance: random.Random | None = None,
    ) -> None:
        self.replica = replica
        self.kit = kit
        self.renderer = renderer
        self.grammars = grammars
        self.deadlines = deadlines
        self.ledger = ledger
        self.clock = clock
        self.limits = limits
        self.served_names = tuple(served_names)
        self.kind = kind
        self.chance = chance or random.Random(secrets.randbits(128))  # noqa: S311  # sampling, not secrets
        self.ids: Iterator[str] = (f"gen-{number}" for number in itertools.count())
        self.admission = Admission(limits.max_concurrent_requests, limits.max_queued_requests, self.retry_after_s)
        self.quarantine = Quarantine(clock)
        self.is_draining = False
        self._open: set[OpenRequest] = set()

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.served_names[0]

    @property
    def num_open(self) -> int:
        """Requests inside this pipeline."""
        return len(self._open)

    @property
    def open_requests(self) -> tuple[OpenRequest, ...]:
        """The requests inside this pipeline."""
        return tuple(self._open)

    def take_on(self, request: OpenRequest) -> None:
        """Counts a request among the open ones, until ``forget``."""
        self._open.add(request)

    def forget(self, request: OpenRequest) -> None:
        """Drops a request that has closed."""
        self._open.discard(request)

    def drain(self) -> None:
        """Refuses what is new, and what waits for a place; what runs goes on."""
        self.is_draining = True
        for request in self.open_requests:
            if not request.is_submitted:
                request.fail(self.overloaded("the server is shutting down: send this to another", "draining"))

    def end_all(self, *, is_stream: bool) -> int:
        """Ends the streaming or the other requests, because the drain's time is over. Returns how many."""
        ended = [request for request in self._open if request.is_stream is is_stream]
        for request in ended:
            request.fail(self.overloaded("the server has shut down before this was finished", "server_shutdown"))
        return len(ended)

    def overloaded(self, message: str, code: str) -> OverloadedError:
        """Makes a 503 with a spread-out moment to come back."""
        return OverloadedError(message, code=code, retry_after_s=self.retry_after_s())

    def error_of(self, event: Failed) -> HeadraceError:
        """Gives the error that a worker's failure code stands for; its own words stay in the log of the worker."""
        match event.code:
            case "queue_full" | "model_loading" | "draining" | "queue_timeout" | "engine_out_of_memory":
                return self.overloaded(event.message, event.code)
            case "generation_timeout":
                return DeadlineError(event.message)
            case "numerical_error":
                return NumericalError(event.message)
            case "context_length_exceeded" | "invalid_value" | "invalid_grammar" | "grammar_failed":
                return RequestError(event.message, code=event.code)
            case _:
                return EngineError("the engine failed this request", code="engine_error")

    def retry_after_s(self) -> float:
        """Gives 1 to 5 s, so that clients refused together do not come back together."""
        return self.chance.uniform(1.0, 5.0)

    def check_ready(self) -> Welcome:
        """Gives the replica's identity when it can take requests.

        Raises:
            OverloadedError: loading, draining, or no healthy replica.
        """
        if self.is_draining:
            raise self.overloaded("the server is shutting down: send this to another", "draining")
        readiness = self.replica.readiness
        identity = self.replica.identity
        match readiness:
            case Readiness.READY:
                assert identity is not None
                return identity
            case Readiness.LOADING:
                raise self.overloaded(f"the model {self.name} is loading: try again later", "model_loading")
            case Readiness.DRAINING:
                raise self.overloaded("the model's worker is shutting down: try again later", "draining")
            case Readiness.DISCONNECTED | Readiness.STALLED:
                raise self.overloaded("the model's worker does not answer: try again later", "no_healthy_upstream")

    def context_tokens(self, identity: Welcome) -> int:
        """Gives the context of a request: the worker's, or less where it is configured."""
        limit = self.limits.max_context_tokens
        return identity.context_tokens if limit is None else min(limit, identity.context_tokens)
