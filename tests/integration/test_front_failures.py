"""What clients hear when workers die, places run out, time runs out or they leave themselves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from headrace.base.clock import ManualClock
from headrace.replica.port import Readiness
from headrace.testing.mock_worker import Fault, Reply, Script

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say hi"}]}
STREAM = {**CHAT, "stream": True}
CHAT_PATH = "/v1/chat/completions"
ENDLESS = Reply(text="x" * 50, inter_token_s=0.001)


async def until(condition: Callable[[], bool], *, limit_s: float = 5.0) -> None:
    """Waits for a condition, at most ``limit_s``."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


def outcomes(house: Any) -> dict[str, float]:
    counters = house.front.recorder.snapshot().counters.get("headrace_requests_total", {})
    return {labels[-1]: value for labels, value in counters.items()}


def raw_request(body: dict[str, Any]) -> bytes:
    """Gives a chat request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


async def read_frames(response: Any) -> list[str]:
    return [frame for frame in (await response.read()).decode().split("\n\n") if frame]


async def test_worker_death_in_a_stream_is_one_error_frame_and_the_end(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello world", fault=Fault.CRASH, fault_at_token=4)))

    async with asyncio.timeout(1.0), house.client.post(house.url(CHAT_PATH), json=STREAM) as response:
        frames = await read_frames(response)

    assert response.status == 200
    error = json.loads(frames[-1].removeprefix("data: "))["error"]
    assert error["code"] == "worker_lost"
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert not any("[DONE]" in frame for frame in frames)
    assert all('"finish_reason":null' in frame for frame in frames[:-1])
    assert outcomes(house) == {"worker_lost": 1}


async def test_worker_death_fails_a_whole_answer_that_had_begun(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello world", fault=Fault.CRASH, fault_at_token=4)))

    status, body, headers = await house.post(CHAT_PATH, CHAT)

    assert (status, body["error"]["code"]) == (500, "worker_lost")
    assert headers["x-should-retry"] == "false"


async def test_a_request_without_tokens_is_run_again_by_the_next_worker(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(fault=Fault.CRASH)))

    answer = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.replica.status is None)
    await house.restart_worker(Script(default=Reply(text="Back")))
    status, body, _ = await answer

    assert status == 200
    assert body["choices"][0]["message"]["content"] == "Back"
    assert outcomes(house) == {"ok": 1}


async def test_a_request_that_was_there_at_two_deaths_is_quarantined(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(fault=Fault.CRASH)))

    answer = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.replica.status is None)
    await house.restart_worker(Script(default=Reply(fault=Fault.CRASH)))
    first = await answer
    await house.restart_worker(Script())
    await house.replica.wait_ready()
    second = await house.post(CHAT_PATH, CHAT)
    other = await house.post(CHAT_PATH, {**CHAT, "messages": [{"role": "user", "content": "Another"}]})

    assert (first[0], first[1]["error"]["code"]) == (422, "request_quarantined")
    assert (second[0], second[1]["error"]["code"]) == (422, "request_quarantined")
    assert other[0] == 200
    assert len(house.worker.received) == 1


async def test_numerical_failure_is_a_500_or_an_error_frame(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello", fault=Fault.NAN, fault_at_token=2)))

    status, body, _ = await house.post(CHAT_PATH, CHAT)
    async with house.client.post(house.url(CHAT_PATH), json=STREAM) as response:
        frames = await read_frames(response)

    assert (status, body["error"]["code"]) == (500, "numerical_error")
    assert '"code":"numerical_error"' in frames[-1]


async def test_early_failure_of_a_stream_keeps_its_status(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(fault=Fault.REFUSE)))

    status, body, headers = await house.post(CHAT_PATH, STREAM)

    assert (status, body["error"]["code"]) == (503, "queue_full")
    assert 1 <= int(headers["retry-after"]) <= 5
    assert headers["x-should-retry"] == "true"


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_its_generation(make_house: Any, is_stream: bool) -> None:
    house = await make_house(Script(default=ENDLESS))
    request = raw_request({**CHAT, "stream": is_stream, "ignore_eos": True, "max_tokens": 3000})

    _, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(request)
    await until(lambda: house.worker.num_running == 1)
    writer.close()
    await until(lambda: house.worker.num_running == 0)

    await until(lambda: outcomes(house) == {"client_gone": 1})
    assert len(house.worker.aborted) == 1
    assert house.pipeline.num_open == 0
    assert house.pipeline.admission.num_running == 0


async def test_a_storm_of_leaving_clients_leaves_nothing_behind(make_house: Any) -> None:
    house = await make_house(Script(default=ENDLESS, max_running=200))
    request = raw_request({**STREAM, "ignore_eos": True, "max_tokens": 3000})

    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", house.port)
        writer.write(request)
        writers.append(writer)
    await until(lambda: house.worker.num_running == 100)
    for writer in writers:
        writer.transport.abort()

    await until(lambda: house.worker.num_running == 0 and house.pipeline.num_open == 0)
    await until(lambda: outcomes(house) == {"client_gone": 100})
    assert (await house.post(CHAT_PATH, {**CHAT, "max_tokens": 1}))[0] == 200


async def test_a_client_that_leaves_the_queue_gives_its_place_back(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(hold_at_token=0)), max_concurrent_requests=1, max_queued_requests=1)
    first = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)
    second = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.pipeline.admission.num_waiting == 1)

    second.cancel()
    await until(lambda: house.pipeline.admission.num_waiting == 0)
    third = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.pipeline.admission.num_waiting == 1)
    house.worker.release()

    assert (await first)[0] == (await third)[0] == 200
    assert len(house.worker.received) == 2


async def test_a_full_queue_refuses_at_once(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(hold_at_token=0)), max_concurrent_requests=1, max_queued_requests=1)
    held = [asyncio.create_task(house.post(CHAT_PATH, CHAT))]
    await until(lambda: house.worker.num_running == 1)
    held.append(asyncio.create_task(house.post(CHAT_PATH, CHAT)))
    await until(lambda: house.pipeline.admission.num_waiting == 1)

    status, body, headers = await house.post(CHAT_PATH, CHAT)
    house.worker.release()

    assert (status, body["error"]["code"], body["error"]["type"]) == (503, "queue_full", "overloaded_error")
    assert "retry-after" in headers
    assert [answer[0] for answer in await asyncio.gather(*held)] == [200, 200]


async def test_waiting_in_our_queue_ends_at_the_queue_timeout(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(
        Script(default=Reply(hold_at_token=0)), clock=clock, max_concurrent_requests=1, first_token_timeout_s=99.0
    )
    first = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)
    second = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.pipeline.admission.num_waiting == 1)

    clock.advance(31.0)
    status, body, _ = await second
    house.worker.release()

    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    assert (await first)[0] == 200


async def test_waiting_in_the_workers_queue_ends_at_the_queue_timeout(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(
        Script(default=Reply(hold_at_token=0), max_running=1), clock=clock, first_token_timeout_s=99.0
    )
    first = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)
    second = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_waiting == 1)

    clock.advance(31.0)
    status, body, _ = await second
    await until(lambda: house.worker.num_waiting == 0)
    house.worker.release()

    assert (status, body["error"]["code"]) == (503, "queue_timeout")
    assert (await first)[0] == 200


async def test_a_first_token_that_does_not_come_is_a_504(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(hold_at_token=0)), clock=clock)
    answer = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: any(run.record.started_at_s is not None for run in house.pipeline.open_requests))

    clock.advance(32.0)
    status, body, _ = await answer

    assert (status, body["error"]["code"]) == (504, "generation_timeout")
    await until(lambda: house.worker.num_running == 0)


async def test_the_total_timeout_ends_a_stream_with_an_error_frame(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(hold_at_token=2)), clock=clock)

    async with house.client.post(house.url(CHAT_PATH), json=STREAM) as response:
        await response.content.readuntil(b"\n\n")
        clock.advance(601.0)
        frames = await read_frames(response)

    assert '"code":"generation_timeout"' in frames[-1]
    assert outcomes(house) == {"generation_timeout": 1}


async def test_held_headers_go_out_after_ten_seconds_then_pings(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(text="Hi", hold_at_token=0)), clock=clock)
    request = asyncio.create_task(house.client.post(house.url(CHAT_PATH), json=STREAM))
    await until(lambda: house.worker.num_running == 1)
    assert not request.done()

    clock.advance(10.5)
    async with await request as response:
        first = await response.content.readuntil(b"\n\n")
        clock.advance(15.5)
        second = await response.content.readuntil(b"\n\n")
        house.worker.release()
        frames = await read_frames(response)

    assert first == second == b": ping\n\n"
    assert frames[-1] == "data: [DONE]"


async def test_a_queue_timeout_after_the_headers_is_an_error_frame(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(hold_at_token=0), max_running=1), clock=clock)
    first = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)
    request = asyncio.create_task(house.client.post(house.url(CHAT_PATH), json=STREAM))
    await until(lambda: house.worker.num_waiting == 1)

    clock.advance(10.5)
    async with await request as response:
        clock.advance(20.0)
        frames = await read_frames(response)
    house.worker.release()
    await first

    assert response.status == 200
    assert '"code":"queue_timeout"' in frames[-1]
    assert not any("[DONE]" in frame for frame in frames)


async def test_a_reader_that_stalls_is_cut(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(text="x" * 5000)), clock=clock)
    request = raw_request({**STREAM, "ignore_eos": True, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20})
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", house.port))
    await loop.sock_sendall(sock, request)

    await until(lambda: outcomes(house) == {"slow_client": 1}, limit_s=20.0)
    await until(lambda: house.worker.num_running == 0)
    sock.close()


async def test_a_stalled_connection_is_cut_after_its_limit(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(text="x" * 5000, inter_token_s=0.0002)), clock=clock)
    request = raw_request({**STREAM, "ignore_eos": True, "max_tokens": 3000, "logprobs": True, "top_logprobs": 20})
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", house.port))
    await loop.sock_sendall(sock, request)
    connections = house.front.listener.limits.open_connections
    await until(lambda: any(connection.paused_at_s is not None for connection in connections), limit_s=20.0)

    clock.advance(60.5)
    house.front.listener.cut_stalled()

    await until(lambda: outcomes(house) == {"slow_client": 1})
    await until(lambda: house.worker.num_running == 0)
    sock.close()


async def test_readiness_follows_the_worker(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(loading_s=None), clock=clock, is_ready=False)
    await until(lambda: house.replica.status is not None)
    loading = [(await house.get(path))[0] for path in ("/health", "/readyz", "/startupz", "/livez")]
    refused = await house.post(CHAT_PATH, CHAT)
    house.worker.finish_loading()
    await house.replica.wait_ready()
    ready = [(await house.get(path))[0] for path in ("/health", "/readyz", "/startupz", "/livez")]
    house.worker.freeze()
    while house.replica.readiness is Readiness.READY:
        clock.advance(5.5)
        await asyncio.sleep(0)
    stalled = [(await house.get(path))[0] for path in ("/health", "/readyz", "/livez")]
    unanswered = await house.post(CHAT_PATH, CHAT)
    house.worker.thaw()

    assert loading == [503, 503, 503, 200]
    assert (refused[0], refused[1]["error"]["code"]) == (503, "model_loading")
    assert ready == [200, 200, 200, 200]
    assert stalled == [503, 503, 200]
    assert (unanswered[0], unanswered[1]["error"]["code"]) == (503, "no_healthy_upstream")


async def test_a_worker_that_beats_but_does_not_step_is_not_ready(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(fault=Fault.HANG, fault_at_token=1)), clock=clock)
    held = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.replica.status is not None and house.replica.status.num_running == 1)

    for _ in range(6):
        clock.advance(1.0)
        steps = house.replica.status
        await until(lambda steps=steps: house.replica.status is not steps)
    status, _, _ = await house.get("/readyz")
    house.worker.thaw()

    assert status == 503
    assert (await held)[0] == 200


async def test_drain_finishes_what_runs_and_refuses_what_is_new(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello", hold_at_token=2)))
    running = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)

    drain = asyncio.create_task(house.front.drain(asyncio.Event()))
    await until(lambda: house.pipeline.is_draining)
    refused = await house.post(CHAT_PATH, CHAT)
    health, _, _ = await house.get("/readyz")
    house.worker.release()

    assert (refused[0], refused[1]["error"]["code"]) == (503, "draining")
    assert refused[2]["connection"] == "close"
    assert health == 503
    assert (await running)[0] == 200
    assert await drain is False


async def test_drain_ends_long_streams_with_an_error_frame(make_house: Any) -> None:
    clock = ManualClock()
    house = await make_house(Script(default=Reply(text="Hello", hold_at_token=2)), clock=clock)
    async with house.client.post(house.url(CHAT_PATH), json=STREAM) as response:
        await response.content.readuntil(b"\n\n")
        drain = asyncio.create_task(house.front.drain(asyncio.Event()))
        await until(lambda: house.pipeline.is_draining)
        clock.advance(121.0)
        frames = await read_frames(response)

    assert '"code":"server_shutdown"' in frames[-1]
    assert await drain is True


async def test_a_second_signal_ends_the_drain_at_once(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(hold_at_token=0)))
    running = asyncio.create_task(house.post(CHAT_PATH, CHAT))
    await until(lambda: house.worker.num_running == 1)
    hurry = asyncio.Event()
    hurry.set()

    was_cut = await house.front.drain(hurry)

    assert was_cut
    assert (await running)[1]["error"]["code"] == "server_shutdown"
