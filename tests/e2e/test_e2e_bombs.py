"""Bombs for the tokenizer, the template and the grammar compiler: answered in bounded time, and nobody else waits.

The lag of the event loop is what `GET /livez` takes on the front; what the machine itself is late by is measured beside
it by a process that only sleeps, and does not count.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LAG_LIMIT_S = 0.2
ANSWER_LIMIT_S = 60.0
_MIB = 2**20
# Until its input ends: sleeps 5 ms, then asks. Prints each time the clock, how late it woke, and what the answer took.
WATCHER = """
import http.client, sys, threading, time
from urllib.parse import urlsplit
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
link = http.client.HTTPConnection(urlsplit(sys.argv[1]).netloc)
while not ended.is_set():
    slept = time.monotonic()
    time.sleep(0.005)
    began = time.monotonic()
    link.request("GET", "/livez")
    assert link.getresponse().read() and time.monotonic() > began
    print(began, began - slept - 0.005, time.monotonic() - began)
"""


def chat(content: Any = "Hi", **fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def text(prompt: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, "max_tokens": 2, **fields}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    # the tokenizer: long words, blanks, characters of many tokens, special tokens by the ten thousand
    "one-word": text("x" * (3 * _MIB)),
    "blanks": text(" " * (3 * _MIB)),
    "emoji": text("🦊" * (_MIB * 3 // 4)),
    "special": text("<s>" * _MIB),
    "cut": text("aé" * _MIB, truncate_prompt_tokens=5),
    "echo": text("ab " * _MIB, echo=True, logprobs=0, max_tokens=0),
    "tokens": ("/tokenize", {"prompt": "word " * (_MIB // 2), "return_token_strs": True}),
    "bad-words": text("Hi", bad_words=["🦊" * 200 + str(index) for index in range(64)]),
    "stops": text("Hi", stop=["a" * 255 + str(index % 10) for index in range(16)]),
    # the template: many turns, many tools, deep ones, its own language in a message
    "turns": (CHAT, {"messages": [{"role": "user", "content": "x"}] * 4096, "max_tokens": 2}),
    "language": chat("{% for i in range(10**9) %}{{ i }}{% endfor %}" * 20_000),
    "parts": chat([{"type": "text", "text": "x"}] * 50_000),
    "tools": chat(tools=[tool(f"f{index}", nested(20)) for index in range(128)]),
    "values": chat(chat_template_kwargs={f"v{index}": "x" * 1000 for index in range(1000)}),
    # the grammar compiler: what multiplies, what refers to itself, what is simply long
    "repeat": chat(guided_regex="((a{1,100}){1,100}){1,100}"),
    "alternatives": chat(guided_regex="|".join(f"[a-z]{{{index}}}x" for index in range(1, 900))),
    "dots": chat(guided_regex="(.*a){40}"),
    "enum": chat(guided_json={"enum": [f"value {index}" for index in range(60_000)]}),
    "all-of": chat(guided_json={"allOf": [nested(8)] * 40}),
    "any-of": chat(guided_json={"anyOf": [{"type": "object", "properties": {f"k{i}": nested(5)}} for i in range(300)]}),
    "recursive": chat(guided_json={"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}),
    "multiple": chat(guided_json={"type": "integer", "multipleOf": 99_999_999}),
    "items": chat(guided_json={"type": "array", "items": {"enum": list(range(500))}, "minItems": 9000}),
    "lark": chat(guided_grammar="\n".join(["start: a", *(f"{a}: {b} {b}" for a, b in pairwise("abcdefg")), 'g: "x"'])),
    "forced": chat(tools=[tool(f"f{index}", nested(12)) for index in range(128)], tool_choice="required"),
}  # fmt: skip


@pytest.mark.timeout(600)
async def test_bombs_are_answered_and_stall_nobody(server: Any) -> None:
    pipe = asyncio.subprocess.PIPE
    watcher = await asyncio.create_subprocess_exec(sys.executable, "-c", WATCHER, server.url, stdin=pipe, stdout=pipe)
    telling = asyncio.create_task(watcher.communicate())
    pid = server.worker_pid()
    spans: dict[str, tuple[float, float]] = {}
    statuses: dict[str, int] = {}

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)) as session:
        for name, (path, body) in BOMBS.items():
            data = io.BytesIO(json.dumps({"model": server.model, **body}, ensure_ascii=False).encode())
            began_s = time.monotonic()
            headers = {"content-type": "application/json"}
            async with session.post(server.url + path, data=data, headers=headers) as response:
                await response.read()
                statuses[name] = response.status
            spans[name] = (began_s, time.monotonic())

    watcher.stdin.close()
    seen = [tuple(map(float, line.split())) for line in (await telling)[0].decode().splitlines()]
    noise_s = max(late_s for _, late_s, _ in seen)
    late = {
        name: round(lag_s, 3)
        for name, (start_s, stop_s) in spans.items()
        if (lag_s := max((took_s for at_s, _, took_s in seen if start_s <= at_s <= stop_s), default=0.0))
        > LAG_LIMIT_S + noise_s
    }
    assert not late, f"the event loop was late (the machine by {noise_s:.3f} s): {late}"
    assert set(statuses.values()) <= {200, 400, 413}, statuses
    assert server.worker_pid() == pid
    server.wait_idle()
