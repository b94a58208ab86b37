"""The HTTP edge: routes, methods, bodies, headers, limits, probes and metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say hi"}]}
CHAT_PATH = "/v1/chat/completions"
POST_PATHS = ["/v1/chat/completions", "/v1/completions"]


async def raw(house: Any, request: bytes, *, is_half_open: bool = False) -> bytes:
    """Sends bytes, gives everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(request)
    if is_half_open:
        writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


async def test_unknown_routes_and_models_are_404(make_house: Any) -> None:
    house = await make_house()

    route = await house.get("/v1/nothing")
    model = await house.get("/v1/models/nothing")
    posted = await house.post(CHAT_PATH, {**CHAT, "model": "Bytes"})

    assert (route[0], json.loads(route[1])["error"]["code"]) == (404, "route_not_found")
    assert (model[0], json.loads(model[1])["error"]["code"]) == (404, "model_not_found")
    assert (posted[0], posted[1]["error"]["code"], posted[1]["error"]["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/completions", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health/", "/health"),
        ("/chat", None),
        ("/v1/", None),
    ],
)
async def test_an_unknown_route_is_told_which_one_was_meant(make_house: Any, path: str, meant: str | None) -> None:
    house = await make_house()

    status, body, _ = await house.post(path, CHAT)

    hint = "" if meant is None else f": did you mean {meant}?"
    assert status == 404
    assert body["error"]["message"] == f"there is no route POST {path} here{hint}"


@pytest.mark.parametrize("path", POST_PATHS)
async def test_wrong_methods_are_405_and_say_what_is_allowed(make_house: Any, path: str) -> None:
    house = await make_house()

    get = await house.get(path)
    async with house.client.delete(house.url("/v1/models")) as delete:
        body = await delete.json()

    assert (get[0], get[2]["allow"]) == (405, "POST")
    assert delete.status == 405
    assert "GET" in delete.headers["allow"]
    assert body["error"]["code"] == "method_not_allowed"


async def test_models_are_listed_with_slashes_encoded_or_not(make_house: Any) -> None:
    house = await make_house()

    listed = json.loads((await house.get("/v1/models"))[1])
    plain = json.loads((await house.get("/v1/models/tests/bytes"))[1])
    answer = await raw(house, b"GET /v1/models/tests%2Fbytes HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")

    assert [model["id"] for model in listed["data"]] == ["tests/bytes", "bytes"]
    assert {"id", "object", "created", "owned_by"} <= set(listed["data"][0])
    assert plain["id"] == "tests/bytes"
    assert plain["max_model_len"] == 4096
    assert status_of(answer) == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"content-type": "text/plain"}, 415, id="text"),
        pytest.param({"content-type": "application/x-www-form-urlencoded"}, 415, id="form"),
        pytest.param({"content-type": "application/json", "content-encoding": "gzip"}, 415, id="gzip"),
        pytest.param({"content-type": "application/json", "content-encoding": "gzip, chunked"}, 415, id="list"),
        pytest.param({"content-type": "application/json", "content-encoding": "identity, br"}, 415, id="list-end"),
        pytest.param({"content-type": "application/json", "content-encoding": "Identity, identity"}, 200, id="as-is"),
        pytest.param({"content-type": "Application/JSON; charset=utf-8"}, 200, id="charset"),
    ],
)
async def test_only_plain_json_bodies_are_read(make_house: Any, headers: dict[str, str], status: int) -> None:
    house = await make_house()

    async with house.client.post(house.url(CHAT_PATH), data=json.dumps(CHAT).encode(), headers=headers) as response:
        assert response.status == status


@pytest.mark.parametrize(
    ("header", "words"),
    [
        pytest.param(b"content-encoding: identity\r\ncontent-encoding: gzip", b"content-encoding 'gzip'", id="twice"),
        pytest.param(b"transfer-encoding: gzip, chunked", b"transfer-encoding 'gzip'", id="transfer"),
    ],
)
async def test_a_coding_that_is_not_undone_is_named(make_house: Any, header: bytes, words: bytes) -> None:
    house = await make_house()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    length = b"" if b"chunked" in header else b"content-length: 2\r\n"

    answer = await raw(house, head + length + header + b"\r\n\r\n" + (b"{}" if length else b"2\r\n{}\r\n0\r\n\r\n"))

    assert status_of(answer) == 415
    assert words in answer


@pytest.mark.parametrize("path", POST_PATHS)
async def test_a_body_is_refused_at_one_byte_over_the_limit(make_house: Any, path: str) -> None:
    house = await make_house(max_body_bytes=1000)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    body = b'{"model":"bytes","messages":[{"role":"user","content":"x"}],"prompt":"x"'

    fits = await raw(
        house, head + b"connection: close\r\ncontent-length: 1000\r\n\r\n" + body + b" " * (999 - len(body)) + b"}"
    )
    told = await raw(house, head + b"content-length: 1001\r\n\r\n" + b" " * 1001)
    chunked = await raw(house, head + b"transfer-encoding: chunked\r\n\r\n3e9\r\n" + b" " * 1001 + b"\r\n0\r\n\r\n")

    assert status_of(fits) == 200
    for answer in (told, chunked):
        assert status_of(answer) == 413
        assert error_of(answer)["code"] == "request_too_large"
        assert b"connection: close" in answer.lower()


async def test_a_body_of_many_tiny_chunks_is_read_whole(make_house: Any) -> None:
    house = await make_house()
    body = json.dumps(CHAT).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"

    answer = await raw(house, head.encode() + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")

    assert status_of(answer) == 200


@pytest.mark.parametrize(
    "request_text",
    [
        pytest.param("GET / HTTP/1.1\r\nhost: a b\r\n\r\n", id="host with a space"),
        pytest.param("GET /livez HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param("GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: evil\r\n\r\n", id="two hosts"),
        pytest.param("nonsense\r\n\r\n", id="no request line"),
        pytest.param(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
            id="two lengths",
        ),
        pytest.param(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
            id="length and chunked",
        ),
        pytest.param("GET /livez HTTP/1.1\r\nhost: localhost\r\n" + "x-a: b\r\n" * 65 + "\r\n", id="65 headers"),
        pytest.param("GET /livez HTTP/1.1\r\nhost: localhost\r\nx-a: " + "b" * 20_000 + "\r\n\r\n", id="long header"),
        pytest.param("GET /livez HTTP/1.1\r\nhost: localhost\r\nx-a: " + "b" * 20_000, id="endless header"),
        pytest.param("GET /" + "b" * 20_000 + " HTTP/1.1\r\nhost: localhost\r\n\r\n", id="long path"),
        pytest.param("GET ftp://localhost/livez HTTP/1.1\r\nhost: localhost\r\n\r\n", id="target of another scheme"),
        pytest.param("GET http://localhost/livez HTTP/1.1\r\n\r\n", id="absolute target and no host"),
        pytest.param(
            "GET http://localhost/ HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", id="absolute target and two hosts"
        ),
    ],
)
async def test_malformed_requests_are_400_with_our_body(make_house: Any, request_text: str) -> None:
    house = await make_house()

    answer = await raw(house, request_text.encode(), is_half_open="endless" not in request_text)

    assert status_of(answer) == 400
    assert error_of(answer)["type"] == "invalid_request_error"
    assert b"x-request-id: " in answer.lower()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"Host": "localhost"}, 200, id="localhost"),
        pytest.param({"Host": "127.0.0.1:8000"}, 200, id="with a port"),
        pytest.param({"Host": "[::1]:8000"}, 200, id="ipv6"),
        pytest.param({"Host": "evil.example"}, 403, id="rebinding"),
        pytest.param({"Origin": "http://localhost:3000"}, 200, id="local page"),
        pytest.param({"Origin": "https://evil.example"}, 403, id="foreign page"),
        pytest.param({"Origin": "null"}, 403, id="sandboxed page"),
    ],
)
async def test_pages_of_other_sites_cannot_reach_a_loopback_server(
    make_house: Any, headers: dict[str, str], status: int
) -> None:
    house = await make_house()

    assert (await house.get("/v1/models", **headers))[0] == status


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ("abc-123", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", False),
    ],
)
async def test_a_sane_request_id_is_kept(make_house: Any, given: str, is_kept: bool) -> None:
    house = await make_house()

    small = await house.get("/version", **{"x-request-id": given})
    _, _, headers = await house.post(CHAT_PATH, {}, **{"x-request-id": given})

    assert (small[2]["x-request-id"] == given) is is_kept
    assert (headers["x-request-id"] == given) is is_kept
    assert headers["x-request-id"]


async def test_errors_say_no_store_and_carry_the_request_id(make_house: Any) -> None:
    house = await make_house()

    status, body, headers = await house.post(CHAT_PATH, b"{")

    assert status == 400
    assert headers["cache-control"] == "no-store"
    assert body["error"]["request_id"] == headers["x-request-id"]
    assert body["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    "request_text",
    [
        pytest.param("GET /livez HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n", id="page"),
        pytest.param(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: http://localhost\r\n"
            "content-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 2\r\n",
            id="endpoint",
        ),
    ],
)
async def test_names_of_headers_are_written_as_most_servers_write_them(make_house: Any, request_text: str) -> None:
    house = await make_house()

    answer = await raw(house, f"{request_text}connection: close\r\n\r\n{{}}".encode())
    head = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")[0]
    names = [line.partition(b":")[0] for line in head.split(b"\r\n")[1:]]

    expected = {b"Content-Type", b"Content-Length", b"Connection", b"X-Request-Id", b"Access-Control-Allow-Origin"}
    assert expected <= set(names)
    assert names == [name.title() for name in names]


async def test_deep_and_broken_bodies_are_refused_quickly(make_house: Any) -> None:
    house = await make_house()

    deep = await house.post(CHAT_PATH, b'{"a":' + b"[" * 250_000)
    nested = await house.post(CHAT_PATH, b'{"a":' + b"[" * 70 + b"]" * 70 + b"}")
    bad = await house.post(CHAT_PATH, b'{"model":"\xff"}')

    assert (deep[0], deep[1]["error"]["code"]) == (400, "json_too_deep")
    assert (nested[0], nested[1]["error"]["code"]) == (400, "json_too_deep")
    assert (bad[0], bad[1]["error"]["code"]) == (400, "invalid_utf8")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_over_the_context_says_both_numbers(make_house: Any, is_stream: bool) -> None:
    house = await make_house()
    long = {"model": "bytes", "messages": [{"role": "user", "content": "word " * 1000}], "stream": is_stream}

    status, body, _ = await house.post(CHAT_PATH, long)
    over = await house.post(CHAT_PATH, {**CHAT, "max_tokens": 4096, "stream": is_stream})
    huge = await house.post("/v1/completions", {"model": "bytes", "prompt": "x" * 2_000_000, "stream": is_stream})

    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
    assert "maximum context length is 4096 tokens" in body["error"]["message"]
    assert "5017 tokens" in body["error"]["message"]
    assert (over[0], over[1]["error"]["code"]) == (400, "context_length_exceeded")
    assert (huge[0], huge[1]["error"]["code"]) == (400, "context_length_exceeded")
    assert not house.worker.received


async def test_a_chat_without_max_tokens_takes_what_the_context_leaves(make_house: Any) -> None:
    house = await make_house()

    await house.post(CHAT_PATH, CHAT)
    await house.post("/v1/completions", {"model": "bytes", "prompt": "x" * 4090})

    prompt_tokens = len("user: Say hi\nassistant:")
    assert [submit.max_tokens for submit in house.worker.received] == [4096 - prompt_tokens, 6]


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "logit_bias"])
async def test_ids_that_the_model_does_not_have_are_refused(make_house: Any, field: str) -> None:
    house = await make_house()
    value: Any = {"131072": 1} if field == "logit_bias" else [131_072]

    status, body, _ = await house.post("/v1/completions", {"model": "bytes", "prompt": "x", field: value})

    assert (status, body["error"]["param"]) == (400, field)
    assert "131072" in body["error"]["message"]


async def test_sampling_fields_reach_the_worker(make_house: Any) -> None:
    house = await make_house()
    body = {
        **CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": -1, "logit_bias": {"65": -100}, "n": 1.0,
        "stop_token_ids": [66], "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "priority": 3, "cache_salt": "s",
    }  # fmt: skip

    await house.post(CHAT_PATH, body)

    submit = house.worker.received[0]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.5, -0.5)
    assert (sampling.seed, sampling.logit_bias) == (2**64 - 1, {65: -100.0})
    assert (submit.stop_token_ids, submit.min_tokens, submit.max_tokens, submit.ignore_eos) == ([66], 2, 9, True)
    assert (submit.priority, submit.cache_salt) == (3, "s")


async def test_metrics_answer_get_and_head_and_carry_the_aliases(make_house: Any) -> None:
    house = await make_house()
    await house.post(CHAT_PATH, CHAT)

    status, text, headers = await house.get("/metrics")
    async with house.client.head(house.url("/metrics")) as head:
        assert head.status == 200

    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'headrace_requests_total{model="tests/bytes",endpoint="chat",outcome="ok"} 1' in text
    assert 'vllm:generation_tokens_total{model_name="tests/bytes"} 36' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tests/bytes"} 1' in text
    assert 'headrace_worker_ready{model="tests/bytes"} 1' in text


async def test_every_request_is_counted_under_one_outcome(make_house: Any) -> None:
    house = await make_house()

    await house.post(CHAT_PATH, CHAT)
    await house.post(CHAT_PATH, {})
    await house.post("/v1/completions", {"model": "nobody", "prompt": "x"})
    await house.post("/v1/completions", b"[]")

    counters = house.front.recorder.snapshot().counters["headrace_requests_total"]
    assert counters == {
        ("tests/bytes", "chat", "ok"): 1,
        ("", "chat", "missing_required"): 1,
        ("", "completions", "model_not_found"): 1,
        ("", "completions", "invalid_json"): 1,
    }


async def test_a_connection_serves_one_request_after_another(make_house: Any) -> None:
    house = await make_house()
    body = json.dumps(CHAT).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    last = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

    answer = await raw(house, request + request + last)

    assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        pytest.param("http://localhost/v1/models", "localhost", 200, id="path"),
        pytest.param("HTTP://127.0.0.1:8000/livez?x=1", "evil.example", 200, id="the target's host counts"),
        pytest.param("http://evil.example/livez", "localhost", 403, id="of another host"),
        pytest.param("http://localhost?x=1", "localhost", 405, id="no path, which is /"),
    ],
)
async def test_a_target_may_be_a_whole_address(make_house: Any, target: str, host: str, status: int) -> None:
    house = await make_house()

    answer = await raw(house, f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())

    assert status_of(answer) == status


async def test_a_stream_to_an_http_1_0_client_has_no_chunks_and_ends_with_the_connection(make_house: Any) -> None:
    house = await make_house()
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 6}).encode()
    head = f"POST {CHAT_PATH} HTTP/1.%d\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    rest = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    old, new = [await raw(house, (head % minor).encode() + rest) for minor in (0, 1)]

    old_head, _, old_body = old.partition(b"\r\n\r\n")
    frames = old_body.split(b"\n\n")
    assert b"transfer-encoding" not in old_head.lower()
    assert b"Transfer-Encoding: chunked" in new.partition(b"\r\n\r\n")[0]
    assert frames[-2:] == [b"data: [DONE]", b""]
    assert all(frame.startswith(b"data: ") for frame in frames[:-1])
    assert len(frames) == new.count(b"data: ") + 1


async def test_what_is_no_http_behind_a_refused_body_gets_no_second_answer(make_house: Any) -> None:
    house = await make_house(max_body_bytes=1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", house.port)

    writer.write(
        f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        "transfer-encoding: chunked\r\n\r\n3e9\r\n".encode()
    )
    writer.write(b" " * 1001 + b"\r\n")
    answer = await reader.readuntil(b"}}")
    writer.write(b"no size\r\n")
    async with asyncio.timeout(20):
        answer += await reader.read()
    writer.close()

    assert answer.count(b"HTTP/1.1 ") == 1
    assert status_of(answer) == 413


async def test_an_upgrade_is_answered_as_a_plain_request(make_house: Any) -> None:
    house = await make_house()
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"

    assert status_of(await raw(house, request)) == 200


HOSTILE = {
    "one long word": b'{"model":"bytes","messages":[{"role":"user","content":"' + b"a" * 4_000_000 + b'"}]}',
    "keys": b"{" + b",".join(b'"%d":1' % number for number in range(350_000)) + b"}",
    "lists": b'{"model":"bytes","x":[' + b",".join([b"[]"] * 1_000_000) + b"]}",
    "numbers": b'{"model":"bytes","x":[' + b",".join([b"1"] * 1_500_000) + b"]}",
    "escapes": b'{"model":"bytes","x":"' + b'\\"' * 1_500_000 + b'"}',
    "depth": b'{"x":' + b"[" * 3_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_the_loop_stays_responsive_under_a_hostile_body(make_house: Any, name: str) -> None:
    house = await make_house()
    loop = asyncio.get_running_loop()
    worst_s = 0.0

    async def probe() -> None:
        nonlocal worst_s
        while True:
            due_s = loop.time() + 0.01
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, loop.time() - due_s)

    probing = asyncio.create_task(probe())
    statuses = [
        status for status, _, _ in await asyncio.gather(*(house.post(CHAT_PATH, HOSTILE[name]) for _ in range(2)))
    ]
    probing.cancel()

    assert statuses == [400] * 2
    # The promise is 0.2 s on an idle machine (measured: 0.08 s); here the client and other tests run beside it.
    assert worst_s < 0.5


async def test_slow_headers_and_slow_bodies_are_408(make_house: Any) -> None:
    house = await make_house(header_timeout_s=0.2, body_idle_s=0.2)
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()

    slow_head = await raw(house, head)
    slow_body = await raw(house, head + b"content-length: 100\r\n\r\n{")
    silent = await raw(house, b"")

    for answer in (slow_head, slow_body):
        assert status_of(answer) == 408
        assert error_of(answer)["code"] == "request_read_timeout"
        assert b"connection: close" in answer.lower()
    assert silent == b""


async def test_too_many_connections_are_refused_with_a_503(make_house: Any) -> None:
    house = await make_house(max_connections=2)
    held = [await asyncio.open_connection("127.0.0.1", house.port) for _ in range(2)]
    limits = house.front.listener.limits
    while len(limits.open_connections) < 2:
        await asyncio.sleep(0)

    answer = await raw(house, b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    for _, writer in held:
        writer.close()

    assert status_of(answer) == 503
    assert error_of(answer)["code"] == "too_many_connections"


async def test_a_client_that_leaves_while_it_sends_is_counted_and_forgotten(make_house: Any) -> None:
    house = await make_house()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()

    _, writer = await asyncio.open_connection("127.0.0.1", house.port)
    writer.write(head + b"content-length: 100\r\n\r\n{")
    while not house.front.listener.num_exchanges:
        await asyncio.sleep(0)
    writer.transport.abort()
    await house.front.listener.wait_ended()

    counters = house.front.recorder.snapshot().counters["headrace_requests_total"]
    assert counters == {("", "chat", "client_gone"): 1}  # it never said which model it meant


async def test_template_variables_that_nobody_reads_are_listed(make_house: Any) -> None:
    house = await make_house()

    values = {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"}
    _, _, headers = await house.post(CHAT_PATH, {**CHAT, **values, "odd\nname,": 1})

    assert headers["x-headrace-ignored-fields"] == "odd\\nname,reasoning_effort,chat_template_kwargs.thinking"


async def test_a_server_beyond_loopback_answers_any_host_but_shows_no_metrics(make_house: Any) -> None:
    house = await make_house(is_loopback=False)

    metrics = await house.get("/metrics", Host="models.example")

    assert (metrics[0], json.loads(metrics[1])["error"]["code"]) == (401, "missing_api_key")
    assert (await house.get("/v1/models", Host="models.example"))[0] == 200
    assert (await house.get("/v1/models", Host="models.example", Origin="http://evil.example"))[0] == 403
