from __future__ import annotations

import asyncio
import json

import openai
from common import BASE, KEY, MODEL, WEATHER, check
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=120)
HI = [{"role": "user", "content": "Say hi"}]


@check
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_completion_tokens=8)
    assert answer.choices[0].message.content is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


@check
def stream() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=16, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HI, max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@check
def tools() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=HI, tools=[WEATHER], tool_choice=choice, max_tokens=120, temperature=0
        )
        (call,) = answer.choices[0].message.tool_calls
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
        assert answer.choices[0].finish_reason == "tool_calls"
        follow = [
            *HI,
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        assert client.chat.completions.create(model=MODEL, messages=follow, tools=[WEATHER], max_tokens=5).choices


@check
def tool_stream_helper() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=HI, tools=[WEATHER], tool_choice="required", max_tokens=120, temperature=0
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


class Order(BaseModel):
    sku: str = Field(max_length=6)
    quantity: int = Field(ge=1, le=9)


@check
def parse() -> None:
    create = getattr(client.chat.completions, "parse", None) or client.beta.chat.completions.parse
    answer = create(model=MODEL, messages=HI, response_format=Order, max_tokens=120, temperature=0)
    assert 1 <= answer.choices[0].message.parsed.quantity <= 9


@check
def logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=3, logprobs=True, top_logprobs=2)
    assert all(len(entry.top_logprobs) == 2 for entry in answer.choices[0].logprobs.content)
    text = client.completions.create(model=MODEL, prompt="Grass is", max_tokens=1, logprobs=1, echo=True)
    assert text.choices[0].logprobs.token_logprobs[0] is None


@check
def choices() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, n=2, max_tokens=4, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1]


@check
def errors() -> None:
    for fields, kind in (
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"tool_choice": "required"}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 20000}]}, openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 4, **fields})
        except kind as error:
            assert error.request_id
            assert error.body["message"]
        else:
            raise AssertionError(f"{fields} was accepted")


@check
def cut_stream() -> None:
    with client.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))


@check
def many_at_once() -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0) as many:
            answers = await asyncio.gather(
                *(many.chat.completions.create(model=MODEL, messages=HI, max_tokens=6) for _ in range(8))
            )
        assert len(answers) == 8

    asyncio.run(run())
