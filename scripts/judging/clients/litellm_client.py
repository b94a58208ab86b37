from __future__ import annotations

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from common import BASE, KEY, MODEL, URL, WEATHER, check
from pydantic import BaseModel, Field

HI = [{"role": "user", "content": "Say hi"}]
HERE = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "messages": HI, "temperature": 0}


class Order(BaseModel):
    quantity: int = Field(ge=1, le=9)


@check
def chat() -> None:
    answer = litellm.completion(**HERE, max_tokens=8)
    assert answer.choices[0].message.content is not None
    assert answer.usage.completion_tokens > 0


@check
def stream() -> None:
    whole = litellm.completion(**HERE, max_tokens=16).choices[0].message.content
    chunks = litellm.completion(**HERE, max_tokens=16, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@check
def tools() -> None:
    answer = litellm.completion(**HERE, tools=[WEATHER], tool_choice="required", max_tokens=120)
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["unit"] in ("C", "F")


@check
def structured() -> None:
    answer = litellm.completion(**HERE, response_format=Order, max_tokens=60)
    Order.model_validate_json(answer.choices[0].message.content)


@check
def text() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=BASE, api_key=KEY, prompt="One two", max_tokens=4
    )
    assert isinstance(answer.choices[0].text, str)


@check
def anthropic() -> None:
    answer = litellm.completion(model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, messages=HI, max_tokens=8)
    assert answer.choices[0].message.content is not None


@check
def at_once() -> None:
    async def run() -> None:
        answers = await asyncio.gather(*(litellm.acompletion(**HERE, max_tokens=4) for _ in range(4)))
        assert len(answers) == 4

    asyncio.run(run())


@check
def errors() -> None:
    try:
        litellm.completion(**{**HERE, "messages": [{"role": "user", "content": "word " * 20000}]}, max_tokens=4)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")
