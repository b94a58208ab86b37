"""Poison requests: what was running each time that a worker died is not run a third time.

A suspect (in flight at one death) is retried alone among suspects, so that its batch mates of the first death are not
there at the second, and stay innocent.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from typing import Final

from headrace.base.clock import Clock
from headrace.base.errors import QuarantinedError
from headrace.protocol.frames import Submit

MAX_DEATHS: Final = 2
BLOCKED_S: Final = 600.0
MAX_SUSPECTS: Final = 4096


def fingerprint(submits: tuple[Submit, ...]) -> bytes:
    """Gives the identity of a request's content: prompts, limits and grammar, not its id or seed."""
    digest = hashlib.blake2b(digest_size=16)
    for submit in submits:
        digest.update(array("q", submit.prompt_ids).tobytes())
        digest.update(b"%d/%d;" % (len(submit.prompt_ids), submit.max_tokens))
        if submit.grammar is not None:
            digest.update(submit.grammar.source.encode("utf-8", "surrogatepass"))
    return digest.digest()


def fingerprint_inputs(inputs: list[bytes]) -> bytes:
    """Gives the identity of texts to encode, packed as in ``frames.Encode``."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in inputs:
        digest.update(ids)
        digest.update(b"%d;" % len(ids))
    return digest.digest()


class Quarantine:
    """Counts worker deaths per fingerprint, for ``BLOCKED_S``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._suspects: dict[bytes, tuple[int, float]] = {}
        self.alone = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is suspected, so that fingerprints need not be computed."""
        return not self._suspects

    def check(self, identity: bytes) -> None:
        """Refuses what has been in flight at ``MAX_DEATHS`` deaths.

        Raises:
            QuarantinedError: with ``request_quarantined``.
        """
        suspect = self._suspects.get(identity)
        if suspect is None:
            return
        deaths, until_s = suspect
        if self._clock.now_s() >= until_s:
            del self._suspects[identity]
        elif deaths >= MAX_DEATHS:
            raise QuarantinedError(
                f"this request was running each time that a worker ended ({deaths} times): it is not tried again"
            )

    def note_death(self, identity: bytes) -> None:
        """Counts a death with this request in flight; the oldest suspect makes room when there are too many."""
        deaths, _ = self._suspects.pop(identity, (0, 0.0))
        if len(self._suspects) >= MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        self._suspects[identity] = (deaths + 1, self._clock.now_s() + BLOCKED_S)
