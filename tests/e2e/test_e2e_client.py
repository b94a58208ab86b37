"""The official openai client against a real server, streamed and not."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "Say hi"}]


def joined(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_streamed_chat_equals_the_one_that_is_not(server: Any, temperature: float) -> None:
    request = {"model": server.model, "messages": HI, "max_tokens": 40, "temperature": temperature, "seed": 5}

    whole = server.client.chat.completions.create(**request)
    stream = server.client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)

    assert joined(chunks) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_streamed_completion_equals_the_one_that_is_not(server: Any) -> None:
    request = {"model": server.model, "prompt": "Once upon", "max_tokens": 40, "temperature": 0}
    request["extra_body"] = {"ignore_eos": True}

    whole = server.client.completions.create(**request)
    chunks = list(server.client.completions.create(**request, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.completion_tokens == 40


def test_models_can_be_listed_and_looked_up(server: Any) -> None:
    (model,) = server.client.models.list().data

    assert model.id == server.model == "tests/tiny"
    assert server.client.models.retrieve(server.model).id == server.model


def test_prompt_forms_count_the_same_tokens(server: Any) -> None:
    create = server.client.completions.create
    request = {"model": server.model, "max_tokens": 1, "temperature": 0}

    as_text = create(prompt="the sea", **request)
    as_list = create(prompt=["the sea"], **request)
    echoed = create(prompt="the sea", echo=True, logprobs=0, **request)
    num_tokens = as_text.usage.prompt_tokens

    assert as_list.usage == as_text.usage
    assert len(echoed.choices[0].logprobs.tokens) == num_tokens + 1
    assert echoed.choices[0].text == "the sea" + as_text.choices[0].text


def test_prompts_of_token_ids_are_one_or_many(server: Any) -> None:
    create = server.client.completions.create
    request = {"model": server.model, "max_tokens": 3, "temperature": 0}

    one = create(prompt=[3, 4, 5], **request)
    many = create(prompt=[[3, 4, 5], [6, 7]], **request)

    assert one.usage.prompt_tokens == 3
    assert many.usage.prompt_tokens == 5
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.choices[0].text == one.choices[0].text


def test_seeds_repeat_and_differ(server: Any) -> None:
    def text(seed: int) -> str:
        answer = server.client.chat.completions.create(
            model=server.model, messages=HI, max_tokens=24, temperature=1.0, seed=seed
        )
        return str(answer.choices[0].message.content)

    assert text(42) == text(42)
    assert text(42) != text(43)
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        assert text(seed) == text(seed)


async def test_a_seeded_answer_does_not_depend_on_its_neighbours(server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def ask(index: int, seed: int | None) -> str:
            request = {"model": server.model, "prompt": f"{index} seas", "max_tokens": 32, "temperature": 1.0}
            answer = await client.completions.create(**request, **({} if seed is None else {"seed": seed}))  # type: ignore[call-overload]
            return str(answer.choices[0].text)

        alone = [await ask(index, seed=index) for index in range(8)]
        among, _ = await asyncio.gather(
            asyncio.gather(*(ask(index, seed=index) for index in range(8))),
            asyncio.gather(*(ask(100 + index, seed=None) for index in range(24))),
        )

    assert list(among) == alone


def test_stop_strings_end_the_text_before_them(server: Any) -> None:
    request = {"model": server.model, "prompt": "Count: A B C", "max_tokens": 40, "temperature": 0}
    plain = server.client.completions.create(**request).choices[0].text
    stop = plain[10:14]

    whole = server.client.completions.create(**request, stop=[stop]).choices[0]
    chunks = list(server.client.completions.create(**request, stop=stop, stream=True))

    expected = plain[: plain.index(stop)]
    assert whole.text == "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_chat_log_probabilities_have_the_bytes_of_the_text(server: Any) -> None:
    answer = server.client.chat.completions.create(
        model=server.model, messages=HI, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content

    assert len(entries) == answer.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert text == answer.choices[0].message.content
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0  # greedy: the likeliest is chosen


def test_n_choices_stream_side_by_side(server: Any) -> None:
    chunks = server.chunks(
        CHAT,
        {
            "model": server.model, "messages": HI, "n": 2, "max_tokens": 5, "temperature": 1, "seed": 7,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        },
    )  # fmt: skip
    choices = [choice for chunk in chunks for choice in chunk["choices"]]

    assert {choice["index"] for choice in choices} == {0, 1}
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in mine].count("assistant") == 1
        assert len([choice for choice in mine if choice["finish_reason"]]) == 1
    assert chunks[-1]["usage"]["completion_tokens"] == 10


def test_clients_hear_errors_as_the_classes_they_know(server: Any) -> None:
    client = server.client

    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no-such-model", messages=HI)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=server.model, messages=HI, temperature=9)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": "word " * 20_000}])

    assert missing.value.code == "model_not_found"
    assert wrong.value.param == "temperature"
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length" in long.value.message
    assert all(fault.value.request_id for fault in (missing, wrong, long))


def test_a_client_that_leaves_frees_its_slot(server: Any) -> None:
    client = server.client
    stream = client.chat.completions.create(
        model=server.model, messages=HI, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    stream.close()
    client.close()

    follower = server.client.chat.completions.create(model=server.model, messages=HI, max_tokens=2)

    assert follower.usage.completion_tokens == 2
    server.wait_idle()


@pytest.mark.model
def test_the_demo_model_knows_the_capital_of_france(demo_server: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    request = {"model": demo_server.model, "messages": messages, "temperature": 0, "max_tokens": 30}

    whole = demo_server.client.chat.completions.create(**request)
    stream = demo_server.client.chat.completions.create(**request, stream=True)

    assert joined(stream) == whole.choices[0].message.content
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    # The template's own length, as transformers counts it: one BOS, the default system prompt.
    assert whole.usage.prompt_tokens == 37


@pytest.mark.model
def test_characters_of_several_tokens_stream_whole(demo_server: Any) -> None:
    request = {"model": demo_server.model, "prompt": "🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻", "temperature": 0}

    whole = demo_server.client.completions.create(**request, max_tokens=24).choices[0].text
    chunks = list(demo_server.client.completions.create(**request, max_tokens=24, stream=True))

    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == whole
    assert "🐻" in whole
    assert all("\ufffd" not in text for text in texts[:-1])


@pytest.mark.model
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_a_text_cut_inside_a_character_ends_alike_streamed_or_not(demo_server: Any, max_tokens: int) -> None:
    request = {
        "model": demo_server.model, "prompt": "🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻🦊🐻", "temperature": 0, "max_tokens": max_tokens,
    }  # fmt: skip

    whole = demo_server.client.completions.create(**request)
    chunks = list(demo_server.client.completions.create(**request, stream=True))

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage.completion_tokens == max_tokens
    assert chunks[-1].choices[0].finish_reason == "length"
