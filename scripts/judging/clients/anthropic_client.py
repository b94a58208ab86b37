from __future__ import annotations

import anthropic
from common import KEY, MODEL, URL, check

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
COLD = {"temperature": 0}  # newer clients have no such argument
HI = [{"role": "user", "content": "Say hi"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@check
def message() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=12, messages=HI, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0


@check
def stream() -> None:
    whole = client.messages.create(model=MODEL, max_tokens=16, messages=HI, extra_body=COLD)
    with client.messages.stream(model=MODEL, max_tokens=16, messages=HI, extra_body=COLD) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check
def tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = client.messages.create(model=MODEL, max_tokens=120, messages=HI, tools=[TOOL], tool_choice=choice)
        (block,) = [block for block in answer.content if block.type == "tool_use"]
        assert isinstance(block.input["city"], str)
        assert answer.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        follow = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        client.messages.create(model=MODEL, max_tokens=8, messages=follow, tools=[TOOL])


@check
def tool_stream() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=120, messages=HI, tools=[TOOL], tool_choice={"type": "any"}
    ) as stream:
        final = stream.get_final_message()
    assert any(block.type == "tool_use" and "city" in block.input for block in final.content)


@check
def stop_sequence() -> None:
    free = client.messages.create(model=MODEL, max_tokens=16, messages=HI, extra_body=COLD).content[0].text
    answer = client.messages.create(
        model=MODEL, max_tokens=16, messages=HI, extra_body=COLD, stop_sequences=[free[2:5]]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", free[2:5])


@check
def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=HI).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@check
def errors() -> None:
    for fields, kind in (
        ({"model": "nobody"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": 7}}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{"model": MODEL, "max_tokens": 4, "messages": HI, **fields})
        except kind as error:
            assert error.body["type"] == "error"
        else:
            raise AssertionError(f"{fields} was accepted")
