"""Cases from other servers' public bug reports, played against a real server of the demo model.

`cases/openai_cases.jsonl` says what is sent and what is right; here each case has its check. A case without a check
fails, and one that this model cannot serve must be refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

CASES = {
    case["id"]: case
    for line in (Path(__file__).parent / "cases" / "openai_cases.jsonl").read_text().splitlines()
    for case in [json.loads(line)]
}
NO_ENCODERS = "the demo model is no encoder: it must refuse; encoders have tests of their own"
REFUSED = {name: NO_ENCODERS for name in ("jc-027", "jc-028", "jc-029", "jc-030", "jc-061") if name in CASES}
CHECKS: dict[str, Callable[[Play], None]] = {}


class Play:
    """One case and the server that it is played against."""

    def __init__(self, server: Any, case: dict[str, Any]) -> None:
        self.server = server
        self.case = case
        self.path: str = case["request"]["path"]
        self.body: dict[str, Any] = fill(case["request"]["body"] or {}, server)

    def send(self, **changes: Any) -> Any:
        """Sends the body with changes; gives the decoded answer, which must be a 200."""
        answer = self.server.post(self.path, {**self.body, "stream": False, **changes})
        assert answer.status == 200, answer.content
        return answer.json()

    def refused(self, **changes: Any) -> Any:
        """Sends the body with changes; gives the error of a 400."""
        answer = self.server.post(self.path, {**self.body, **changes})
        assert answer.status == 400, answer.content
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        return error

    def chunks(self, **changes: Any) -> list[Any]:
        chunks: list[Any] = self.server.chunks(self.path, {**self.body, **changes})
        return chunks

    def text(self, answer: Any) -> str:
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    def check_stream_equals_whole(self, **changes: Any) -> tuple[str, Any]:
        whole = self.send(**changes)
        text, finish = joined(self.chunks(**changes))
        assert text == self.text(whole)
        assert finish == whole["choices"][0]["finish_reason"]
        return text, whole


def fill(value: Any, server: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$repeat"}:
            return value["$repeat"][0] * value["$repeat"][1]
        return {key: fill(item, server) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, server) for item in value]
    return server.model if value == "$MODEL" else value


def joined(chunks: list[Any]) -> tuple[str, str | None]:
    texts: list[str] = []
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts.append(choice["delta"].get("content") or "" if "delta" in choice else choice["text"])
            finish = choice["finish_reason"] or finish
    return "".join(texts), finish


def check(*names: str) -> Callable[[Callable[[Play], None]], Callable[[Play], None]]:
    def note(function: Callable[[Play], None]) -> Callable[[Play], None]:
        for name in names:
            CHECKS[name] = function
        return function

    return note


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, demo_server: Any, request: pytest.FixtureRequest) -> None:
    if name in REFUSED:
        answer = demo_server.post(CASES[name]["request"]["path"], CASES[name]["request"]["body"])
        assert 400 <= answer.status < 500, REFUSED[name]
        assert answer.json()["error"]["message"]
        return
    # One hurts its server; a prompt that fills the context takes the demo model a minute.
    others = {"jc-063": "own_demo_server", "jc-038": "server"}
    server = request.getfixturevalue(others[name]) if name in others else demo_server

    CHECKS[name](Play(server, CASES[name]))


MULTIBYTE = "🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻"


@check("jc-001")
def _(play: Play) -> None:
    text, _ = play.check_stream_equals_whole(prompt=MULTIBYTE)
    assert any(ord(char) > 0x2000 for char in text)
    assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in play.chunks(prompt=MULTIBYTE)[:-1])


@check("jc-002")
def _(play: Play) -> None:
    cut = 0
    for count in range(1, 7):
        text, whole = play.check_stream_equals_whole(prompt=MULTIBYTE, max_tokens=count)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == count
        cut += text.endswith("\ufffd")
    assert cut


@check("jc-003", "jc-005")
def _(play: Play) -> None:
    free = play.text(play.send(prompt="Count: A B C", stop=None, max_tokens=40))
    for stop in (free[7:12], free[3:4], "\n"):
        text, whole = play.check_stream_equals_whole(prompt="Count: A B C", stop=[stop], max_tokens=40)
        assert stop not in text
        assert text == free.partition(stop)[0]
        assert whole["choices"][0]["finish_reason"] == ("stop" if stop in free else "length")


@check("jc-006")
def _(play: Play) -> None:
    texts = {play.text(play.send(stop=stop, temperature=0)) for stop in ([], None)}
    assert len(texts) == 1
    assert play.text(play.send(stop="e", temperature=0)) == play.text(play.send(stop=["e"], temperature=0))
    for stop in (5, [""], ["a", ""], [5]):
        assert play.refused(stop=stop)["param"] == "stop"


@check("jc-007", "jc-035")
def _(play: Play) -> None:
    chunks = play.chunks()
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert all("finish_reason" in chunk["choices"][0] for chunk in chunks)
    assert not any(chunk.get("usage") for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1


@check("jc-008", "jc-009")
def _(play: Play) -> None:
    chunks = play.chunks(temperature=0)
    usage = chunks[-1]["usage"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["object"] == ("text_completion" if "prompt" in play.body else "chat.completion.chunk")
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    whole = play.send(temperature=0, stream_options=None)["usage"]
    assert all(whole[key] == usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens"))


@check("jc-011")
def _(play: Play) -> None:
    answer = play.server.post(play.path, play.body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "stream_options")


@check("jc-012")
def _(play: Play) -> None:
    answer = play.send()
    logprobs = answer["choices"][0]["logprobs"]
    count = answer["usage"]["prompt_tokens"] + 1
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {count}
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    sums = {}
    for ending in (" green", " noodle"):
        scored = play.send(prompt="Grass is usually" + ending)["choices"][0]["logprobs"]
        sums[ending] = sum(scored["token_logprobs"][3:-1])
    assert sums[" green"] > sums[" noodle"]


@check("jc-013")
def _(play: Play) -> None:
    answer = play.send()
    assert answer["choices"][0]["text"] == play.body["prompt"]
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]


@check("jc-014")
def _(play: Play) -> None:
    whole = play.send()["choices"][0]["logprobs"]["text_offset"]
    streamed = [
        offset for chunk in play.chunks() for offset in (chunk["choices"][0]["logprobs"] or {}).get("text_offset", [])
    ]
    assert streamed == whole


@check("jc-016")
def _(play: Play) -> None:
    choice = play.send()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


@check("jc-017")
def _(play: Play) -> None:
    names = {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert set(play.send()["choices"][0]["logprobs"]) >= names
    alone = play.send(logprobs=0)["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [dict(zip(alone["tokens"], alone["token_logprobs"], strict=True))]


@check("jc-018")
def _(play: Play) -> None:
    choice = play.send()["choices"][0]
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == choice["message"]["content"].encode()
    for entry in content:
        best = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(best) == 3
        assert best == sorted(best, reverse=True)
    bare = play.send(top_logprobs=None)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * len(bare)


@check("jc-019")
def _(play: Play) -> None:
    assert play.refused()["param"] == "top_logprobs"
    assert play.refused(logprobs=True, top_logprobs=21)["param"] == "top_logprobs"


@check("jc-020")
def _(play: Play) -> None:
    chunks = play.chunks(stream_options={"include_usage": True})
    entries = [entry for chunk in chunks[:-1] for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert len(entries) == chunks[-1]["usage"]["completion_tokens"]


@check("jc-021")
def _(play: Play) -> None:
    counted = play.server.post("/tokenize", {"messages": play.body["messages"], "return_token_strs": True}).json()
    assert play.send()["usage"]["prompt_tokens"] == counted["count"]
    assert counted["token_strs"].count("<|im_start|>") == 3  # system, user and the assistant's opening


@check("jc-022")
def _(play: Play) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n"
    for special in (True, False):
        counted = play.server.post("/tokenize", {"prompt": prompt, "add_special_tokens": special}).json()["count"]
        assert play.send(prompt=prompt, add_special_tokens=special)["usage"]["prompt_tokens"] == counted


@check("jc-025", "jc-026")
def _(play: Play) -> None:
    messages = play.body["messages"]
    counts = set()
    for content in ({}, {"content": None}, {"content": ""}):
        turn = {name: value for name, value in messages[1].items() if name != "content"}
        counts.add(play.send(messages=[messages[0], {**turn, **content}, messages[2]])["usage"]["prompt_tokens"])
    assert len(counts) == 1
    assert counts.pop() > play.send(messages=[messages[0], messages[2]])["usage"]["prompt_tokens"]


@check("jc-033")
def _(play: Play) -> None:
    chunks = play.chunks()
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {choice["index"] for choice in choices} == {0, 1}
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert sum(choice["finish_reason"] is not None for choice in mine) == 1
    assert chunks[-1]["usage"]["completion_tokens"] <= 10
    assert chunks[-1]["usage"]["completion_tokens"] > 5


@check("jc-037", "jc-045")
def _(play: Play) -> None:
    limit = play.body.get("max_tokens") or play.body["max_completion_tokens"]
    answer = play.send()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == limit
    assert joined(play.chunks())[1] == "length"
    free = play.text(play.send(temperature=0))
    both = play.send(temperature=0, stop=[free[-2:]])
    assert both["choices"][0]["finish_reason"] == "stop"


@check("jc-038")
def _(play: Play) -> None:
    limit = play.server.get("/v1/models").json()["data"][0]["max_model_len"]
    ids = [100 + index % 50 for index in range(limit - 8)]
    error = play.refused(prompt=ids)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    answer = play.send(prompt=ids, max_tokens=8)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == limit


@check("jc-039")
def _(play: Play) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "set_lamp"}}):
        answer = play.send(tool_choice=choice)["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert not answer["message"]["content"]
        arguments = json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"])
        assert isinstance(arguments["room"], str)
        assert isinstance(arguments["on"], bool)
        calls: dict[int, list[Any]] = {}
        for chunk in play.chunks(tool_choice=choice):
            for call in chunk["choices"][0]["delta"].get("tool_calls", []):
                calls.setdefault(call["index"], []).append(call)
        for parts in calls.values():
            assert parts[0]["id"]
            assert parts[0]["function"]["name"] == "set_lamp"
            assert not any("id" in part or "name" in part["function"] for part in parts[1:])
            json.loads("".join(part["function"]["arguments"] for part in parts))
        assert calls


@check("jc-041")
def _(play: Play) -> None:
    tool = {"type": "function", "function": {"name": "set_lamp"}}
    assert play.refused()["param"] == "tool_choice"
    named = {"type": "function", "function": {"name": "nobody"}}
    assert play.refused(tools=[tool], tool_choice=named)["param"] == "tool_choice"
    assert "tool_calls" not in play.send(tools=[tool], tool_choice="none")["choices"][0]["message"]


@check("jc-042")
def _(play: Play) -> None:
    free = play.text(play.send(stop=None, temperature=0))
    for stop in (free[5:8], free[-3:]):
        play.check_stream_equals_whole(stop=[stop], temperature=0)
    play.check_stream_equals_whole(stop=None, temperature=0, max_tokens=3)


@check("jc-043")
def _(play: Play) -> None:
    answer = play.send()
    order = json.loads(play.text(answer))
    assert set(order) == {"lines", "buyer"}
    assert order["buyer"] in ("ann", "bo")
    assert 1 <= len(order["lines"]) <= 2
    for line in order["lines"]:
        assert set(line) == {"sku", "qty", "by"}
        assert len(line["sku"]) <= 6
        assert 1 <= line["qty"] <= 9
        assert line["by"] in ("ann", "bo")
    play.check_stream_equals_whole()


@check("jc-044")
def _(play: Play) -> None:
    error = play.refused()
    assert "/$defs/Nope" in error["message"]
    play.refused(stream=True)


@check("jc-047", "jc-048")
def _(play: Play) -> None:
    assert play.send()["usage"]["completion_tokens"] <= 4


@check("jc-052")
def _(play: Play) -> None:
    bad = (None, "x", [123], [{}], [], [{"role": 123, "content": "x"}], [{"role": "user", "content": 123}], [None], {})
    for messages in bad:
        assert play.refused(messages=messages)["param"].startswith("messages")


@check("jc-054")
def _(play: Play) -> None:
    limit = play.server.get("/v1/models").json()["data"][0]["max_model_len"]
    for is_stream in (False, True):
        error = play.refused(stream=is_stream)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {limit} tokens" in error["message"]


@check("jc-056")
def _(play: Play) -> None:
    salt = {"cache_salt": os.urandom(4).hex()}
    first, second = play.send(**salt), play.send(**salt)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < second["usage"]["prompt_tokens_details"]["cached_tokens"] < second["usage"]["prompt_tokens"]
    assert play.text(first) == play.text(second)
    last = play.chunks(**salt, stream_options={"include_usage": True})[-1]
    assert last["usage"]["prompt_tokens_details"] == second["usage"]["prompt_tokens_details"]


@check("jc-057", "jc-058")
def _(play: Play) -> None:
    host, port = play.server.url.removeprefix("http://").split(":")
    body = json.dumps(play.body).encode()
    head = f"POST {play.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        if play.body.get("stream"):
            heard = b""
            while heard.count(b"data: ") < 3:
                heard += client.recv(4096)
        else:
            deadline = time.monotonic() + 30
            while play.server.metric("headrace_requests_running") < 1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    play.server.wait_idle()
    before = play.server.metric("headrace_generation_tokens_total")
    time.sleep(0.3)
    assert play.server.metric("headrace_generation_tokens_total") == before


@check("jc-059")
def _(play: Play) -> None:
    import threading

    texts = {play.text(play.send())}
    others = [
        threading.Thread(target=play.send, kwargs={"prompt": f"Neighbour {index}", "seed": None, "max_tokens": 60})
        for index in range(3)
    ]
    for other in others:
        other.start()
    texts |= {play.text(play.send()) for _ in range(5)}
    for other in others:
        other.join()
    assert len(texts) == 1


@check("jc-060")
def _(play: Play) -> None:
    first = play.text(play.send())
    assert play.text(play.send()) == first
    others = {play.text(play.send(seed=seed)) for seed in (43, 0, -1, -(2**63), 2**63 - 1)}
    assert others - {first}


@check("jc-063")
def _(play: Play) -> None:
    stream = play.server.client.chat.completions.create(
        model=play.server.model,
        messages=play.body["messages"],
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    seen: list[Any] = []

    def hear() -> None:
        for chunk in stream:
            seen.append(chunk)
            if len(seen) == 4:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(play.server.worker_pid(), signal.SIGKILL)

    with pytest.raises(openai.APIError):
        hear()
    assert not any(chunk.choices and chunk.choices[0].finish_reason for chunk in seen)


@check("jc-066")
def _(play: Play) -> None:
    listed = play.server.get("/v1/models").json()
    assert listed["object"] == "list"
    for model in listed["data"]:
        assert model["object"] == "model"
        assert isinstance(model["created"], int)
        assert model["owned_by"]
        assert play.server.get(f"/v1/models/{model['id']}").json()["id"] == model["id"]
    for unknown in ("nobody", "a/b", "a%2Fb"):
        answer = play.server.get(f"/v1/models/{unknown}")
        assert answer.status == 404
        assert answer.json()["error"]["code"] == "model_not_found"
