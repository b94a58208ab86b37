"""What every metered endpoint does around its own work: read the body, tell errors, settle exactly once."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, TypeVar

from headrace.base.errors import HeadraceError
from headrace.base.log import get_log
from headrace.base.recorder import Recorder
from headrace.gateway import ledger as outcomes
from headrace.gateway.ledger import Ledger, Record
from headrace.gateway.models import Models
from headrace.gateway.pipeline import Pipeline
from headrace.protocol.launch import Kind
from headrace.server.exchange import BODY_IDLE_S, CLIENT_CLOSED, ClientGoneError, Exchange
from headrace.server.ignored import IgnoredFields

# Bodies up to here are parsed on the event loop: about 0.2 ms.
_INLINE_BYTES: Final = 16 * 2**10

_log = get_log(__name__)
_T = TypeVar("_T")


class Endpoint(ABC):
    """One metered endpoint.

    Args:
        name: for metrics and logs.
        executor: where large bodies are parsed.
    """

    def __init__(
        self,
        name: str,
        *,
        models: Models,
        ledger: Ledger,
        recorder: Recorder,
        executor: Executor,
    ) -> None:
        self._name = name
        self._models = models
        self._ledger = ledger
        self._executor = executor
        self._ignored = IgnoredFields(name, recorder)

    @abstractmethod
    async def _serve(self, exchange: Exchange, record: Record) -> None:
        """Answers one request; errors are told by the caller."""

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request, and settles it exactly once."""
        record = self._ledger.open(exchange.request_id, self._name)
        task = asyncio.current_task()
        assert task is not None
        exchange.on_gone(lambda: _cancel(task))
        outcome = outcomes.OK
        error: HeadraceError | None = None
        try:
            try:
                await self._serve(exchange, record)
            except HeadraceError as fault:
                error = fault
                outcome = fault.stable_code
                await _tell(exchange, fault)
        except ClientGoneError:
            outcome = outcomes.CLIENT_GONE
        except asyncio.CancelledError:
            if not exchange.is_gone:
                outcome = "cancelled"
                raise
            task.uncancel()
            outcome = _why_gone(exchange)
        except Exception as bug:  # noqa: BLE001  # the request handler's edge: a bug costs one request
            outcome = "internal_error"
            error = HeadraceError("the server failed this request; the fault is logged under its request id")
            _log.error("endpoint_error", request_id=exchange.request_id, exc_info=bug)
            await _tell(exchange, error)
        finally:
            exchange.on_gone(None)
            if exchange.is_gone and outcome == outcomes.OK:
                outcome = _why_gone(exchange)
            status = CLIENT_CLOSED if exchange.is_gone else exchange.status or 500
            self._ledger.settle(record, status, outcome, error)

    def _find(self, record: Record, name: str | None, *kinds: Kind) -> Pipeline:
        """Gives the model that a request means, and notes it.

        Raises:
            HeadraceError: as ``Models.find``.
        """
        record.model = name or ""
        pipeline = self._models.find(name, *kinds)
        record.model = name or pipeline.name
        record.canonical = pipeline.name
        return pipeline

    async def _read(
        self, exchange: Exchange, parse: Callable[[bytes], _T], max_bytes: int, idle_s: float = BODY_IDLE_S
    ) -> _T:
        """Gives the parsed body; a large one is parsed in a thread."""
        body = await exchange.read_body(max_bytes, idle_s)
        if len(body) <= _INLINE_BYTES:
            return parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._executor, parse, body)


async def _tell(exchange: Exchange, error: HeadraceError) -> None:
    """Says an error in the form that the answer's state still allows."""
    if exchange.is_gone or exchange.is_complete:
        return
    if exchange.has_begun:
        await exchange.fail_stream(error)
    else:
        await exchange.answer_error(error)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _why_gone(exchange: Exchange) -> str:
    connection = exchange.connection
    return (connection.cut_reason if connection is not None else None) or outcomes.CLIENT_GONE
