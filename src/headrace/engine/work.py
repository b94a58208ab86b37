"""What a worker's loop needs of a scheduler and an executor, whatever the model makes: tokens or vectors."""

from __future__ import annotations

from typing import Any, Protocol

from headrace.engine.blocks import BlockPool
from headrace.engine.scheduler import Totals
from headrace.protocol.frames import Event


class WorkPlan(Protocol):
    """One step. The rest of it is between the scheduler and the executor that belong together."""

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        ...

    @property
    def reason(self) -> str:
        """What was decided, for logs."""
        ...


class WorkExecutor(Protocol):
    """Runs plans."""

    def run(self, plan: Any, /) -> Any:
        """Runs one step; what comes back is for ``complete``."""
        ...


class WorkScheduler(Protocol):
    """All requests of a worker; see ``engine.scheduler`` and ``engine.encode_scheduler``."""

    @property
    def pool(self) -> BlockPool:
        """KV pages; an empty pool where none are kept."""
        ...

    @property
    def totals(self) -> Totals:
        """What has happened so far."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that have started."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests that have not."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        ...

    def take_events(self) -> dict[int, list[Event]]:
        """Hands over what the peers must hear."""
        ...

    def has_request(self, owner: int, request_id: str) -> bool:
        """Whether this request has not ended."""
        ...

    def abort(self, owner: int, request_id: str, now_s: float) -> None:
        """Ends a request."""
        ...

    def abort_owner(self, owner: int) -> int:
        """Ends all requests of a peer that is gone."""
        ...

    def plan(self, now_s: float, max_steps: int = 1) -> WorkPlan | None:
        """Decides the next step, or so many that may be run in a row."""
        ...

    def complete(self, plan: Any, result: Any, now_s: float) -> None:
        """Takes a step's result."""
        ...

    def fail_step(self, plan: Any, code: str, message: str) -> None:
        """Ends every request of a step that could not be run."""
        ...

    def fail_all(self, code: str, message: str) -> None:
        """Ends every request."""
        ...
