"""Typed answers out of recorded calls: one, and several at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import instructor
import openai
from common import BASE, KEY, check
from pydantic import BaseModel
from recordings import ALL, HI


class get_current_temperature(BaseModel):  # noqa: N801  # the name that the recorded call has
    location: str
    unit: Literal["celsius", "fahrenheit"]


class search(BaseModel):  # noqa: N801
    q: str


def name_of(*, call: str, count: int) -> str:
    """Gives the first recording that calls nothing but this, so many times."""
    return next(
        recording["model"]
        for recording in ALL
        if len(recording["calls"]) == count and {name for name, _ in recording["calls"]} == {call}
    )


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0), mode=mode)


@check
def one_call() -> None:
    found = client(instructor.Mode.TOOLS).chat.completions.create(
        model=name_of(call="get_current_temperature", count=1),
        response_model=get_current_temperature, messages=HI, max_retries=0, tool_choice="auto",
    )  # fmt: skip
    assert (found.location, found.unit) == ("San Francisco, California, United States", "celsius")


@check
def several_calls() -> None:
    found = client(instructor.Mode.PARALLEL_TOOLS).chat.completions.create(
        model=name_of(call="search", count=2),
        response_model=Iterable[search], messages=HI, max_retries=0, tool_choice="auto",
    )  # fmt: skip
    assert [one.q for one in found] == ["cats", "dogs"]
