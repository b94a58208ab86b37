from __future__ import annotations

from common import BASE, KEY, MODEL, check
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

chat = ChatOpenAI(
    base_url=BASE, api_key=KEY, model=MODEL, max_retries=0, temperature=0, max_tokens=120, stream_usage=True
)


class Order(BaseModel):
    """One order."""

    sku: str = Field(max_length=6)
    quantity: int = Field(ge=1, le=9)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


@check
def invoke() -> None:
    answer = chat.invoke("Say hi")
    assert isinstance(answer.content, str)
    assert answer.usage_metadata["total_tokens"] > 0


@check
def stream() -> None:
    chunks = list(chat.stream("Say hi"))
    assert "".join(chunk.content for chunk in chunks) == chat.invoke("Say hi").content
    assert any(chunk.usage_metadata for chunk in chunks)


@check
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        order = chat.with_structured_output(Order, method=method).invoke("Make an order")
        assert 1 <= order.quantity <= 9


@check
def tools() -> None:
    bound = chat.bind_tools([get_weather], tool_choice="any")
    answer = bound.invoke("Weather in Paris?")
    assert answer.tool_calls[0]["name"] == "get_weather"
    follow = [HumanMessage("Weather?"), AIMessage("", tool_calls=answer.tool_calls)]
    follow.append(ToolMessage("sunny", tool_call_id=answer.tool_calls[0]["id"]))
    assert isinstance(chat.invoke(follow).content, str)
    joined = None
    for chunk in bound.stream("Weather in Paris?"):
        joined = chunk if joined is None else joined + chunk
    assert joined.tool_calls[0]["args"]["city"] is not None


@check
def completion() -> None:
    assert isinstance(OpenAI(base_url=BASE, api_key=KEY, model=MODEL, max_tokens=6).invoke("One two"), str)
