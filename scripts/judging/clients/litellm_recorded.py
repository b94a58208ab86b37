from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from common import BASE, KEY, URL
from recordings import HI, reads


def asked(recording) -> dict:
    here = {"model": f"openai/{recording['model']}", "api_base": BASE, "api_key": KEY}
    return {**here, "messages": HI, "tools": recording["tools"]}


def found(answer) -> dict:
    message = answer.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"text": message.content or "", "thought": getattr(message, "reasoning_content", None) or "", "calls": calls}


@reads()
def whole(recording) -> dict:
    return found(litellm.completion(**asked(recording)))


@reads()
def streamed(recording) -> dict:
    return found(litellm.stream_chunk_builder(list(litellm.completion(**asked(recording), stream=True))))


@reads()
def messages(recording) -> dict:
    here = {"model": f"anthropic/{recording['model']}", "api_base": URL}
    return found(litellm.completion(**{**asked(recording), **here}, max_tokens=2000))
