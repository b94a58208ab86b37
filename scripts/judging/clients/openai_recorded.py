from __future__ import annotations

import openai
from common import BASE, KEY
from recordings import HI, reads

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)


def found(message) -> dict:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return {"text": message.content or "", "thought": getattr(message, "reasoning_content", None) or "", "calls": calls}


@reads(keeps=lambda recording: True, is_exact=True)
def whole(recording) -> dict:
    answer = client.chat.completions.create(model=recording["model"], messages=HI, tools=recording["tools"])
    assert answer.choices[0].finish_reason == ("tool_calls" if recording["calls"] else "stop")
    return found(answer.choices[0].message)


@reads(keeps=lambda recording: True, is_exact=True)
def streamed(recording) -> dict:
    text, thought, calls, finished = "", "", [], []
    for chunk in client.chat.completions.create(
        model=recording["model"], messages=HI, tools=recording["tools"], stream=True
    ):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id and call.type == "function"
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
        finished += [choice.finish_reason] if choice.finish_reason else []
    assert finished == ["tool_calls" if recording["calls"] else "stop"], finished
    return {"text": text, "thought": thought, "calls": [tuple(call) for call in calls]}


@reads(keeps=lambda recording: True, is_exact=True)
def stream_helper(recording) -> dict:
    with client.chat.completions.stream(model=recording["model"], messages=HI, tools=recording["tools"]) as stream:
        for _ in stream:
            pass
        found_calls = found(stream.get_final_completion().choices[0].message)
    return {"text": found_calls["text"], "calls": found_calls["calls"]}
