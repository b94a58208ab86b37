from __future__ import annotations

from common import BASE, KEY
from langchain_openai import ChatOpenAI
from recordings import reads


def bound(recording):
    chat = ChatOpenAI(base_url=BASE, api_key=KEY, model=recording["model"], max_retries=0)
    return chat.bind_tools(recording["tools"])


def found(message) -> dict:
    assert not message.invalid_tool_calls
    return {"text": message.content, "calls": [(call["name"], call["args"]) for call in message.tool_calls]}


@reads()
def whole(recording) -> dict:
    return found(bound(recording).invoke("Hi"))


@reads()
def streamed(recording) -> dict:
    joined = None
    for chunk in bound(recording).stream("Hi"):
        joined = chunk if joined is None else joined + chunk
    return found(joined)
