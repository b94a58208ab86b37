"""The mock server over real sockets: the official client is served, faults are real faults, the log is the truth."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from headrace.bench.mock.script import read_script
from headrace.bench.mock.server import MockServer
from headrace.bench.mock.truth import TruthLog, read_truths

CHAT = {"messages": [{"role": "user", "content": "two words"}], "stream": True, "max_tokens": 4}


@asynccontextmanager
async def serve(truth: Path | None = None, **flags: object) -> AsyncIterator[tuple[MockServer, int]]:
    script = read_script(None, {"ttft_ms": 1, "itl_ms": 1, **flags})
    crashes: list[int] = []
    server = MockServer(script, truth=TruthLog(truth) if truth else None, crash=crashes.append)
    server.crashes = crashes  # type: ignore[attr-defined]  # for the test alone
    port = await server.start("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop()


async def raw(port: int, body: dict[str, object], path: str = "/v1/chat/completions") -> bytes:
    """Gives all bytes until the server closes; a reset raises."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        return await reader.read(-1)
    finally:
        writer.close()


async def test_the_official_client_gets_all_it_asks_for() -> None:
    async with serve(tokens=5) as (_, port):
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
        whole = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a b"}])
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "a b"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="m", prompt="a b c", max_tokens=2)
        vectors = await client.embeddings.create(model="m", input=["a", "b"])
        models = await client.models.list()
        await client.close()

    assert whole.choices[0].message.content == "The water comes down the"
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The water comes down the"
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (2, 5)
    assert text.choices[0].text == "The water"
    assert text.choices[0].finish_reason == "length"
    assert [len(item.embedding) for item in vectors.data] == [384, 384]
    assert vectors.data[0].embedding != vectors.data[1].embedding
    assert [model.id for model in models.data] == ["mock"]


async def test_rerank_orders_by_score_and_health_is_good() -> None:
    async with serve() as (_, port):
        answer = await raw(port, {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}, "/v1/rerank")

    results = json.loads(answer.split(b"\r\n\r\n", 1)[1])["results"]
    assert len(results) == 2
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]


@pytest.mark.parametrize(
    ("body", "said"),
    [({}, "messages is missing"), ({"messages": 3}, "messages"), ({"messages": [{}], "max_tokens": "x"}, "max_tokens")],
)
async def test_a_wrong_request_is_refused_by_field(body: dict[str, object], said: str) -> None:
    async with serve() as (_, port):
        answer = await raw(port, body)

    assert answer.startswith(b"HTTP/1.1 400")
    assert said in json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


async def test_requests_on_one_connection_are_answered_in_order() -> None:
    async with serve(tokens=1) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        content = b'{"prompt": "a"}'
        one = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content)
        writer.write(one + one + b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = await reader.read(-1)
        writer.close()

    assert answer.count(b"HTTP/1.1 200") == 3
    assert answer.index(b"cmpl-mock0") < answer.index(b"cmpl-mock1")


async def _ends_without_done(port: int) -> None:
    assert b"[DONE]" not in await raw(port, CHAT)


async def _is_reset(port: int) -> None:
    with pytest.raises(ConnectionResetError):
        await raw(port, CHAT)


async def _hangs(port: int) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(raw(port, CHAT), 0.2)


async def _has_no_done_but_ends_well(port: int) -> None:
    answer = await raw(port, CHAT)
    assert b"[DONE]" not in answer
    assert answer.endswith(b"0\r\n\r\n")


async def _has_bad_json_and_goes_on(port: int) -> None:
    answer = await raw(port, CHAT)
    assert b'data: {"choices": [{"delta": \n\n' in answer
    assert b"[DONE]" in answer


async def _says_the_error(port: int) -> None:
    answer = await raw(port, CHAT)
    assert b'data: {"error":' in answer
    assert b"[DONE]" not in answer


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("close", _ends_without_done),
        ("reset", _is_reset),
        ("hang", _hangs),
        ("no_done", _has_no_done_but_ends_well),
        ("malformed", _has_bad_json_and_goes_on),
        ("stream_error", _says_the_error),
    ],
)
async def test_faults_are_what_they_are_called(
    tmp_path: Path, kind: str, check: Callable[[int], Awaitable[None]]
) -> None:
    async with serve(tmp_path / "truth", faults=[{"kind": kind, "at_token": 2}]) as (_, port):
        await check(port)
        await asyncio.sleep(0)

    (truth,) = read_truths(tmp_path / "truth")
    assert truth.fault == kind
    assert truth.tokens == (2 if kind in ("close", "reset", "hang", "stream_error") else 4)


async def test_a_crash_comes_before_its_token_and_leaves_its_truth(tmp_path: Path) -> None:
    async with serve(tmp_path / "truth", faults=[{"kind": "crash", "at_token": 1}]) as (server, port):
        with pytest.raises(TimeoutError):  # the process would be gone; here the connection just stays
            await asyncio.wait_for(raw(port, CHAT), 0.1)
        (truth,) = read_truths(tmp_path / "truth")

    assert server.crashes == [70]  # type: ignore[attr-defined]
    assert (truth.fault, truth.tokens) == ("crash", 1)


async def test_a_share_of_requests_fails_with_the_status_it_should() -> None:
    errors = [{"status": 429, "ratio": 0.5, "retry_after_s": 3}]
    async with serve(errors=errors, tokens=1) as (_, port):
        answers = [await raw(port, CHAT) for _ in range(40)]

    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429")]
    assert 8 <= len(refused) <= 32  # drawn from seed 0: always the same number
    assert all(b"retry-after: 3\r\n" in answer for answer in refused)


async def test_writes_go_out_when_they_are_due_and_never_before(tmp_path: Path) -> None:
    async with serve(tmp_path / "truth", ttft_ms=30, itl_ms=2) as (_, port):
        await raw(port, {**CHAT, "max_tokens": 20})

    (truth,) = read_truths(tmp_path / "truth")
    late_s = [write - due for write, due in zip(truth.write_s, truth.due_s, strict=True)]
    assert len(late_s) == 20
    assert min(late_s) > -50e-6  # calls that are due within 20 µs are made at once
    assert sorted(late_s)[10] < 0.010  # half a millisecond is usual; a busy machine is later
    assert truth.due_s[-1] - truth.arrival_s == pytest.approx(0.030 + 19 * 0.002)


async def test_with_one_slot_requests_wait_in_line(tmp_path: Path) -> None:
    async with serve(tmp_path / "truth", ttft_ms=20, tokens=1, slots=1) as (_, port):
        await asyncio.gather(*(raw(port, CHAT) for _ in range(3)))

    truths = read_truths(tmp_path / "truth")
    for before, after in itertools.pairwise(truths):
        assert after.due_s[0] >= before.ended_s + 0.0199
