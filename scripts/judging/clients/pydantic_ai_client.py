from __future__ import annotations

import asyncio

from common import BASE, KEY, MODEL, check
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
SETTINGS = {"temperature": 0, "max_tokens": 200}


class Order(BaseModel):
    quantity: int = Field(ge=1, le=9)


@check
def text() -> None:
    assert isinstance(Agent(model).run_sync("Say hi", model_settings=SETTINGS).output, str)


@check
def native_output() -> None:
    agent = Agent(model, output_type=NativeOutput(Order), retries=0)
    assert 1 <= agent.run_sync("Make an order", model_settings=SETTINGS).output.quantity <= 9


@check
def tool_output() -> None:
    agent = Agent(model, output_type=ToolOutput(Order), retries=0)
    assert 1 <= agent.run_sync("Make an order", model_settings=SETTINGS).output.quantity <= 9


@check
def stream() -> None:
    async def run() -> str:
        async with Agent(model).run_stream("Say hi", model_settings=SETTINGS) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert asyncio.run(run())
