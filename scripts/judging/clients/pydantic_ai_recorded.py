from __future__ import annotations

import asyncio

from common import BASE, KEY
from pydantic_ai.direct import model_request, model_request_stream
from pydantic_ai.messages import ModelRequest, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from recordings import reads


def asked(recording) -> tuple:
    model = OpenAIChatModel(recording["model"], provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    names = [tool["function"]["name"] for tool in recording["tools"]]
    tools = [ToolDefinition(name=name, parameters_json_schema={"type": "object"}) for name in names]
    return model, [ModelRequest.user_text_prompt("Hi")], ModelRequestParameters(function_tools=tools)


def found(answer) -> dict:
    joined = {"text": "", "thought": "", "calls": []}
    for part in answer.parts:
        match part:
            case TextPart():
                joined["text"] += part.content
            case ThinkingPart():
                joined["thought"] += part.content
            case ToolCallPart():
                joined["calls"].append((part.tool_name, part.args_as_dict()))
    return joined


@reads()
def whole(recording) -> dict:
    model, messages, parameters = asked(recording)
    return found(asyncio.run(model_request(model, messages, model_request_parameters=parameters)))


@reads()
def streamed(recording) -> dict:
    async def run():
        model, messages, parameters = asked(recording)
        async with model_request_stream(model, messages, model_request_parameters=parameters) as stream:
            async for _ in stream:
                pass
            return stream.get()

    return found(asyncio.run(run()))
