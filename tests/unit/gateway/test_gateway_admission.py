"""Places and the queue before them."""

from __future__ import annotations

import asyncio

import pytest

from headrace.base.errors import OverloadedError
from headrace.gateway.admission import Admission


def ignore(_future: asyncio.Future[None]) -> None:
    pass


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_admit_refuses_when_the_queue_is_full() -> None:
    admission = Admission(1, 1, retry_after_s=lambda: 2.5)
    await admission.enter(1, ignore)
    waiting = asyncio.create_task(admission.enter(1, ignore))
    await turn()

    with pytest.raises(OverloadedError) as caught:
        await admission.enter(1, ignore)

    assert (caught.value.stable_code, caught.value.retry_after_s) == ("queue_full", 2.5)
    with pytest.raises(OverloadedError):
        admission.check_room()
    waiting.cancel()


async def test_the_first_that_waits_goes_first() -> None:
    admission = Admission(2, 9)
    await admission.enter(2, ignore)
    order: list[int] = []

    async def enter(name: int, weight: int) -> None:
        await admission.enter(weight, ignore)
        order.append(name)

    tasks = [asyncio.create_task(enter(name, weight)) for name, weight in ((1, 2), (2, 1), (3, 1))]
    await turn()
    admission.leave(1)
    await turn()
    assert order == []
    admission.leave(1)
    await turn()
    assert order == [1]
    admission.leave(2)
    await asyncio.gather(*tasks)

    assert order == [1, 2, 3]
    assert (admission.num_running, admission.num_waiting) == (2, 0)


async def test_a_request_wider_than_the_house_takes_all_of_it() -> None:
    admission = Admission(4, 9)

    assert await admission.enter(8, ignore) == 4
    assert admission.num_running == 4


async def test_a_cancelled_waiter_lets_the_next_one_in() -> None:
    admission = Admission(2, 9)
    await admission.enter(1, ignore)
    wide = asyncio.create_task(admission.enter(2, ignore))
    await turn()
    narrow = asyncio.create_task(admission.enter(1, ignore))
    await turn()

    wide.cancel()
    await turn()

    assert narrow.done()
    assert (admission.num_running, admission.num_waiting) == (2, 0)


async def test_a_place_given_to_a_waiter_that_is_cancelled_in_the_same_turn_is_not_lost() -> None:
    admission = Admission(1, 9)
    await admission.enter(1, ignore)
    waiting = asyncio.create_task(admission.enter(1, ignore))
    await turn()

    admission.leave(1)
    waiting.cancel()
    await turn()

    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_failed_waiter_leaves_the_queue_with_its_error() -> None:
    admission = Admission(1, 9)
    await admission.enter(1, ignore)
    futures: list[asyncio.Future[None]] = []
    waiting = asyncio.create_task(admission.enter(1, futures.append))
    await turn()

    futures[0].set_exception(OverloadedError("late", code="queue_timeout"))
    admission.leave(1)

    with pytest.raises(OverloadedError, match="late"):
        await waiting
    assert (admission.num_running, admission.num_waiting) == (0, 0)
