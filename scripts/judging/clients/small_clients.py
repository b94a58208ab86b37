from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import BASE, KEY, MODEL, WEATHER, check

HI = [{"role": "user", "content": "Say hi"}]


@check
def huggingface_hub_chat() -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=BASE, api_key=KEY)
    answer = client.chat_completion(HI, model=MODEL, max_tokens=12, temperature=0)
    chunks = client.chat_completion(HI, model=MODEL, max_tokens=12, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content


@check
def huggingface_hub_tools() -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=BASE, api_key=KEY)
    answer = client.chat_completion(HI, model=MODEL, max_tokens=120, tools=[WEATHER], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@check
def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=BASE, api_key=KEY, is_chat_model=True, max_tokens=12, temperature=0)
    whole = model.chat([ChatMessage(role="user", content="Say hi")]).message.content
    *_, last = model.stream_chat([ChatMessage(role="user", content="Say hi")])
    assert last.message.content == whole
    plain = OpenAILike(model=MODEL, api_base=BASE, api_key=KEY, is_chat_model=False, max_tokens=6)
    assert isinstance(plain.complete("One two").text, str)


@check
def llm_command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        entry = f"- model_id: judged\n  model_name: {MODEL}\n  api_base: {BASE}\n  api_key_name: none\n"
        (Path(folder) / "extra-openai-models.yaml").write_text(entry)
        command = [
            str(Path(sys.executable).with_name("llm")),
            "-m",
            "judged",
            "--key",
            KEY,
            "-o",
            "max_tokens",
            "8",
            "Hi",
        ]
        done = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-300:]
