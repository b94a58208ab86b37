"""Thousands of request bodies, good and broken: none may fail inside, and none may cost the worker its life."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest

from headrace.testing.request_bodies import Body, BodyMaker, Verdict

VOCAB_SIZE = 320
# Well below the queue's limit: a refusal for lack of room would say nothing about the body.
CONCURRENCY = 16


async def send(session: aiohttp.ClientSession, url: str, body: Body) -> tuple[int, str]:
    """Gives the status, and what is wrong with the answer, if anything."""
    headers = {"content-type": "application/json"}
    async with session.post(url + body.path, data=body.data, headers=headers) as response:
        data = await response.read()
    status = response.status
    if status >= 500:
        return status, data.decode("utf-8", "replace")
    if body.verdict is Verdict.GOOD and status != 200:
        return status, data.decode("utf-8", "replace")
    if body.verdict is Verdict.BAD and not 400 <= status < 500:
        return status, "a broken body was accepted"
    if status == 200 and body.is_stream and not data.endswith(b"data: [DONE]\n\n"):
        return status, f"the stream ended with {data[-200:]!r}"
    if status >= 400 and b'"error"' not in data:
        return status, f"no error object: {data[:200]!r}"
    data.decode("utf-8")
    return status, ""


async def flood(server: Any, bodies: list[Body]) -> Counter[int]:
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(session: aiohttp.ClientSession, body: Body) -> None:
        async with room:
            status, fault = await send(session, server.url, body)
        statuses[status] += 1
        if fault:
            wrong.append(f"{status} for {body.what} {body.verdict}: {fault[:300]} <- {body.data[:300]!r}")

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(one(session, body) for body in bodies))
    assert not wrong, "\n".join([f"{len(wrong)} of {len(bodies)} went wrong", *wrong[:20]])
    return statuses


@pytest.mark.timeout(900)
async def test_five_thousand_bodies_are_answered_or_refused(server: Any) -> None:
    count = 5000
    maker = BodyMaker(server.model, VOCAB_SIZE, seed=2)
    before = server.worker_pid()

    statuses = await flood(server, [maker.make() for _ in range(count)])

    assert statuses[200] >= 0.3 * count, statuses
    assert max(statuses) < 500
    assert server.worker_pid() == before
    server.wait_idle()
