"""The port to something that generates. The gateway knows replicas only by this."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from headrace.protocol.frames import Encode, Status, Submit, Welcome
from headrace.replica.events import EventStream


class Readiness(StrEnum):
    """Whether a replica can take requests, and if not, why.

    STALLED: connected, but silent or without a step while work waits.
    """

    READY = "ready"
    LOADING = "loading"
    DISCONNECTED = "disconnected"
    STALLED = "stalled"
    DRAINING = "draining"


class Replica(Protocol):
    """Something that turns token ids into token ids."""

    @property
    def identity(self) -> Welcome | None:
        """What the replica serves; None before it was first reached."""
        ...

    @property
    def status(self) -> Status | None:
        """Its last heartbeat."""
        ...

    @property
    def readiness(self) -> Readiness:
        """Whether it can take requests now."""
        ...

    @property
    def was_ready(self) -> bool:
        """Whether it could take requests at some time; a model that comes back loads once more."""
        ...

    def generate(self, *submits: Submit) -> EventStream:
        """Starts requests whose events come in one stream.

        Raises:
            WorkerLostError: there is no link; nothing was started.
        """
        ...

    def encode(self, request: Encode) -> EventStream:
        """Starts a request for vectors.

        Raises:
            WorkerLostError: there is no link; nothing was started.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests now; their further events are dropped."""
        ...

    async def wait_ready(self) -> None:
        """Returns when the replica has become ready."""
        ...
