"""A streamed answer joins to the one that is not, whatever the prompt, the stops, the limit and the sampling."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest

# The ordinary run's; `-m slow` asks for 1,000 others.
NUM_REQUESTS = 200
NUM_SLOW_REQUESTS = 1000
_WORDS = ("the", " mill", "🦊", "é", "\n", " water", "漢", "</", "<think>", "{", '"', " a", "مرحبا", "\t", "x" * 20)


def make(seed: int, model: str) -> tuple[str, dict[str, Any]]:
    chance = random.Random(seed)
    prompt = "".join(chance.choice(_WORDS) for _ in range(chance.randrange(1, 12)))
    stops = ["".join(chance.choice("etaoinsr hlé漢🦊\n") for _ in range(chance.randrange(1, 4))) for _ in range(2)]
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": chance.randrange(1, 60),
        "temperature": chance.choice((0, 0.7, 1.5)),
        "seed": seed,
        "stop": chance.choice((None, stops, stops[:1])),
        "include_stop_str_in_output": chance.random() < 0.2,
        "skip_special_tokens": chance.random() < 0.8,
        "n": chance.choice((1, 1, 2)),
        "ignore_eos": chance.random() < 0.5,
        "return_token_ids": chance.random() < 0.3,
        "bad_words": chance.choice((None, None, ["e", "the"])),
    }
    if chance.random() < 0.5:
        body |= {"messages": [{"role": "user", "content": prompt}], "logprobs": chance.random() < 0.3}
        return "/v1/chat/completions", body
    body |= {"prompt": prompt, "logprobs": chance.choice((None, None, 2)), "echo": chance.random() < 0.3}
    return "/v1/completions", body


def parts(choice: dict[str, Any]) -> tuple[str, list[Any]]:
    """Gives the text and the log-probabilities of a choice or a chunk's choice."""
    message = choice.get("message", choice.get("delta"))
    logprobs = choice["logprobs"] or {}
    text = (message.get("content") or "") if message is not None else choice["text"]
    return text, logprobs.get("content") or logprobs.get("token_logprobs") or []


@pytest.mark.timeout(600)
async def test_streams_join_to_whole_answers(server: Any) -> None:
    await compare(server, range(NUM_REQUESTS))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_a_thousand_streams_join_to_whole_answers(server: Any) -> None:
    await compare(server, range(10_000, 10_000 + NUM_SLOW_REQUESTS))


async def compare(server: Any, seeds: range) -> None:
    """Asks for each seed's answer whole and streamed."""
    room = asyncio.Semaphore(8)

    async with aiohttp.ClientSession() as session:

        async def one(seed: int) -> None:
            path, body = make(seed, server.model)
            async with room:
                async with session.post(server.url + path, json=body) as response:
                    whole = await response.json()
                streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
                async with session.post(server.url + path, json=streamed) as response:
                    raw = (await response.read()).decode("utf-8")
            assert response.status == 200, (whole, body)
            *frames, last, end = raw.split("\n\n")
            assert (last, end) == ("data: [DONE]", ""), body
            chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames if frame.startswith("data: ")]
            for index, choice in enumerate(whole["choices"]):
                mine = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
                text, logprobs = parts(choice)
                assert "".join(parts(part)[0] for part in mine) == text, body
                assert [entry for part in mine for entry in parts(part)[1]] == logprobs, body
                assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"], body
                ids = [token for part in mine for token in part.get("token_ids", [])]
                assert ids == (choice["token_ids"] or []), body
                for stop in body["stop"] or []:
                    echoed = len(body.get("prompt", "")) if body.get("echo") else 0
                    found = text[echoed:].find(stop)
                    assert found < 0 or body["include_stop_str_in_output"], body
            totals = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [chunks[-1]["usage"][name] for name in totals] == [whole["usage"][name] for name in totals], body

        await asyncio.gather(*(one(seed) for seed in seeds))
