"""huggingface-hub, llama-index and `llm` on recorded outputs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from common import BASE, KEY
from huggingface_hub import InferenceClient
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from recordings import ALL, HI, reads

hub = InferenceClient(base_url=BASE, api_key=KEY)


@reads()
def hub_whole(recording) -> dict:
    message = hub.chat_completion(HI, model=recording["model"], tools=recording["tools"]).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"text": message.content or "", "calls": calls}


@reads()
def hub_streamed(recording) -> dict:
    text, calls = "", []
    for chunk in hub.chat_completion(HI, model=recording["model"], tools=recording["tools"], stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    return {"text": text, "calls": [tuple(call) for call in calls]}


def llama_index_of(recording):
    return OpenAILike(
        model=recording["model"], api_base=BASE, api_key=KEY, is_chat_model=True, is_function_calling_model=True
    )


def found(model, answer) -> dict:
    calls = model.get_tool_calls_from_response(answer, error_on_no_tool_call=False)
    return {"text": answer.message.content or "", "calls": [(call.tool_name, call.tool_kwargs) for call in calls]}


@reads()
def llama_index_whole(recording) -> dict:
    model = llama_index_of(recording)
    return found(model, model.chat([ChatMessage(role="user", content="Hi")], tools=recording["tools"]))


@reads()
def llama_index_streamed(recording) -> dict:
    model = llama_index_of(recording)
    *_, last = model.stream_chat([ChatMessage(role="user", content="Hi")], tools=recording["tools"])
    return found(model, last)


home = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(home)
entry = "- model_id: {0}\n  model_name: {0}\n  api_base: {1}\n  supports_tools: true\n"
(home / "extra-openai-models.yaml").write_text("".join(entry.format(one["model"], BASE) for one in ALL))
import llm  # noqa: E402  # it reads its folder when it is imported

# Asked for one model by name, it reads its folder and makes all of them anew: a second of CPU each time.
llm_models = {model.model_id: model for model in llm.get_models()}


def llm_asked(recording, *, is_stream: bool) -> dict:
    names = [tool["function"]["name"] for tool in recording["tools"]]
    tools = [llm.Tool(name=name, input_schema={"type": "object"}) for name in names]
    answer = llm_models[recording["model"]].prompt("Hi", tools=tools, stream=is_stream, key=KEY)
    calls = [(call.name, call.arguments) for call in answer.tool_calls()]
    return {"text": answer.text(), "calls": calls}


@reads()
def llm_whole(recording) -> dict:
    return llm_asked(recording, is_stream=False)


@reads()
def llm_streamed(recording) -> dict:
    return llm_asked(recording, is_stream=True)
