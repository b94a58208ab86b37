"""Deadlines on a clock that moves only when told to, and the quarantine that uses it."""

from __future__ import annotations

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import QuarantinedError
from headrace.gateway.deadlines import Deadlines
from headrace.gateway.quarantine import BLOCKED_S, Quarantine, fingerprint
from headrace.protocol.frames import Sampling, Submit


def test_deadlines_expire_in_order_and_once() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock)
    seen: list[str] = []
    deadlines.after(2.0, lambda: seen.append("second"))
    deadlines.after(1.0, lambda: seen.append("first"))
    deadlines.after(3.0, lambda: seen.append("never")).cancel()

    clock.advance(0.9)
    deadlines.run_due()
    assert seen == []
    clock.advance(5.0)
    deadlines.run_due()
    deadlines.run_due()

    assert seen == ["first", "second"]
    assert len(deadlines) == 0


def test_a_deadline_may_set_another_one() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock)
    seen: list[float] = []

    def again() -> None:
        seen.append(clock.now_s())
        deadlines.after(1.0, again)

    deadlines.after(1.0, again)
    for _ in range(3):
        clock.advance(1.0)
        deadlines.run_due()

    assert seen == [1.0, 2.0, 3.0]


def test_cancelled_deadlines_do_not_pile_up() -> None:
    deadlines = Deadlines(ManualClock())

    for _ in range(10_000):
        deadlines.after(600.0, lambda: None).cancel()

    assert len(deadlines) < 1000


def submit(prompt: list[int], seed: int = 0, request_id: str = "a") -> Submit:
    return Submit(request_id, prompt, 5, Sampling(seed=seed))


def test_a_fingerprint_is_of_the_content_alone() -> None:
    assert fingerprint((submit([1, 2], 1, "a"),)) == fingerprint((submit([1, 2], 2, "b"),))
    assert fingerprint((submit([1, 2]),)) != fingerprint((submit([1, 3]),))
    assert fingerprint((submit([1, 2]), submit([3]))) != fingerprint((submit([1]), submit([2, 3])))


def test_two_deaths_block_for_ten_minutes() -> None:
    clock = ManualClock()
    quarantine = Quarantine(clock)
    identity = fingerprint((submit([1]),))

    assert quarantine.is_empty
    quarantine.note_death(identity)
    quarantine.check(identity)
    quarantine.note_death(identity)
    with pytest.raises(QuarantinedError) as caught:
        quarantine.check(identity)
    clock.advance(BLOCKED_S)
    quarantine.check(identity)

    assert (caught.value.http_status, caught.value.param) == (422, None)
    assert quarantine.is_empty
