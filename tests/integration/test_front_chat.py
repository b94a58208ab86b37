"""Chat and text completions over the mock worker: shapes, order of chunks, usage."""

from __future__ import annotations

import json
from typing import Any

from headrace.testing.mock_worker import Reply, Script

CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "Say hi"}]}


async def test_chat_answers_with_the_workers_text(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))

    status, body, headers = await house.post("/v1/chat/completions", CHAT)

    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len("user: Say hi\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5,
        "total_tokens": prompt_tokens + 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert isinstance(body["system_fingerprint"], str)
    assert headers["x-request-id"]


async def test_chat_stream_is_role_deltas_finish_done(make_house: Any) -> None:
    house = await make_house(Script(default=Reply(text="Hello")))

    frames = await house.stream("/v1/chat/completions", CHAT)

    assert frames[-1] == "[DONE]"
    chunks = [json.loads(frame) for frame in frames[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
