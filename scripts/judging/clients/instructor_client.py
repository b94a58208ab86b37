from __future__ import annotations

import instructor
import openai
from common import BASE, KEY, MODEL, check
from pydantic import BaseModel, Field


class Line(BaseModel):
    sku: str = Field(max_length=6)
    quantity: int = Field(ge=1, le=9)


class Order(BaseModel):
    lines: list[Line] = Field(min_length=1, max_length=2)


def make(mode: instructor.Mode) -> Order:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        response_model=Order,
        messages=[{"role": "user", "content": "Make one order"}],
        max_tokens=300,
        temperature=0,
        max_retries=0,
    )


@check
def tools() -> None:
    assert 1 <= make(instructor.Mode.TOOLS).lines[0].quantity <= 9


@check
def json_schema() -> None:
    assert 1 <= make(instructor.Mode.JSON_SCHEMA).lines[0].quantity <= 9
