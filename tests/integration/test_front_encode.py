"""A request for vectors is among a front's open requests: it is waited for, timed and quarantined like any other."""

from __future__ import annotations

import asyncio
from array import array
from base64 import b64decode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.base.errors import RequestError
from headrace.gateway.encoding import Encoding, Tokens
from headrace.protocol.frames import pack_ids
from headrace.testing.mock_worker import Fault, Reply, Script

BATCH = {"model": "bytes", "input": ["abc", "de", "f"], "encoding_format": "base64"}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say hi"}]}
PATH = "/v1/embeddings"


def encoder(reply: Reply | None = None, **more: Any) -> Script:
    return Script(default=reply or Reply(), vector_width=4, **more)


async def until(condition: Callable[[], bool], *, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


def vectors(body: Any) -> list[list[float]]:
    return [array("f", b64decode(item["embedding"])).tolist() for item in body["data"]]


async def test_the_drain_waits_for_a_batch_that_runs(make_house: Any) -> None:
    house = await make_house(encoder(Reply(hold_at_token=1)))
    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.worker.num_running == 1)

    drain = asyncio.create_task(house.front.drain(asyncio.Event()))
    await until(lambda: house.pipeline.is_draining)
    refused = await house.post(PATH, BATCH)
    num_open = house.pipeline.num_open
    house.worker.release()
    status, body, _ = await answer

    assert (refused[0], refused[1]["error"]["code"]) == (503, "draining")
    assert num_open == 1
    assert status == 200
    assert vectors(body) == [[97.0, 98.0, 99.0, 0.0], [100.0, 101.0, 0.0, 0.0], [102.0, 0.0, 0.0, 0.0]]
    assert await drain is False


async def test_the_drains_end_ends_a_batch_with_its_own_error(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(encoder(Reply(hold_at_token=1)), clock=clock)
    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.worker.num_running == 1)

    drain = asyncio.create_task(house.front.drain(asyncio.Event()))
    await until(lambda: house.pipeline.is_draining)
    clock.advance(31.0)
    status, body, _ = await answer

    assert (status, body["error"]["code"]) == (503, "server_shutdown")
    assert await drain is True
    await until(lambda: house.worker.num_running == 0)


@pytest.mark.parametrize("is_ours", [True, False], ids=["our-queue", "workers-queue"])
async def test_waiting_to_be_started_ends_at_the_queue_timeout(make_house: Any, is_ours: bool) -> None:
    clock = ManualClock()
    limits = {"max_concurrent_requests": 1} if is_ours else {}
    script = encoder(Reply(hold_at_token=0), max_running=1)
    house = await make_house(script, clock=clock, first_token_timeout_s=99.0, **limits)
    admission = house.pipeline.admission
    first = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.worker.num_running == 1)
    second = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: (admission.num_waiting if is_ours else house.worker.num_waiting) == 1)

    clock.advance(31.0)
    status, body, _ = await second
    house.worker.release()

    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    assert (await first)[0] == 200
    await until(lambda: house.pipeline.num_open == 0)


async def test_a_first_vector_that_does_not_come_is_a_504(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(encoder(Reply(hold_at_token=0)), clock=clock)
    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: any(ticket.record.started_at_s is not None for ticket in house.pipeline.open_requests))

    clock.advance(32.0)
    status, body, _ = await answer

    assert (status, body["error"]["code"]) == (504, "generation_timeout")


async def test_the_total_timeout_ends_a_batch(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(encoder(Reply(hold_at_token=2)), clock=clock)
    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.worker.num_steps == 2)

    clock.advance(601.0)
    status, body, _ = await answer

    assert (status, body["error"]["code"]) == (504, "generation_timeout")


async def test_a_batch_is_run_once_more_by_the_next_worker(make_house: Any) -> None:
    house = await make_house(encoder(Reply(fault=Fault.CRASH, fault_at_token=2)))

    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.replica.status is None)
    await house.restart_worker(encoder())
    status, body, _ = await answer

    assert status == 200
    assert len(vectors(body)) == 3


async def test_a_batch_that_was_there_at_two_deaths_is_quarantined(make_house: Any) -> None:
    house = await make_house(encoder(Reply(fault=Fault.CRASH)))

    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.replica.status is None)
    await house.restart_worker(encoder(Reply(fault=Fault.CRASH)))
    first = await answer
    await house.restart_worker(encoder())
    await house.replica.wait_ready()
    second = await house.post(PATH, BATCH)
    other = await house.post(PATH, {**BATCH, "input": "another"})

    assert (first[0], first[1]["error"]["code"]) == (422, "request_quarantined")
    assert (second[0], second[1]["error"]["code"]) == (422, "request_quarantined")
    assert other[0] == 200


async def test_a_client_that_leaves_ends_its_batch(make_house: Any) -> None:
    house = await make_house(encoder(Reply(hold_at_token=1)))
    answer = asyncio.create_task(house.post(PATH, BATCH))
    await until(lambda: house.worker.num_running == 1)

    answer.cancel()

    await until(lambda: house.worker.num_running == 0 and house.pipeline.num_open == 0)
    assert house.pipeline.admission.num_running == 0


async def test_a_batch_of_more_tokens_than_a_frame_holds_is_refused_before_it_is_sent(make_house: Any) -> None:
    house = await make_house(encoder())
    pipeline = house.pipeline
    encoding = Encoding(pipeline, "bytes", pipeline.ledger.open("r", "embeddings"), ThreadPoolExecutor(1))
    text = pack_ids([7] * 1024)

    with pytest.raises(RequestError, match=r"9437184 tokens in all, the limit is 8388608"):
        await encoding.run(lambda reader: Tokens([text] * (9 * 1024)))
    encoding.close()

    assert house.worker.num_steps == 0
