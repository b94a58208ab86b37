"""The tools of a chat, and whether, which and how many of them may be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from headrace.base.errors import RequestError
from headrace.protocol.fields import Fields
from headrace.protocol.messages import parse_tools
from headrace.protocol.strict_json import shown

_RULE: Final = '"none", "auto", "required" or an object that names a function of tools'
# What a schema of no arguments is made of.
_NO_ARGUMENTS: Final = frozenset({"type", "properties", "required", "title", "description", "$schema"})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that a model may call.

    Args:
        tools: OpenAI's function tools, as they came; what the template shows.
        callable_tools: those of them that may be called, at least one.
        is_forced: the answer must be a call.
        is_parallel: it may be several. A forced answer is one call unless the client says ``parallel_tool_calls``:
            where nothing but calls may follow, small models repeat theirs until their tokens run out.
    """

    tools: list[dict[str, object]]
    callable_tools: list[dict[str, object]]
    is_forced: bool
    is_parallel: bool


def take_tool_use(fields: Fields) -> ToolUse | None:
    """Takes ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where nothing may be called.

    Raises:
        RequestError: a choice without tools, or of a function that is not among them.
    """
    tools = parse_tools(fields)
    choice = fields.take("tool_choice")
    is_asked = fields.take("parallel_tool_calls") is not None
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    if choice is None:
        choice = "auto"
    if choice not in ("none", "auto", "required") and not isinstance(choice, dict):
        raise fields.wrong("tool_choice", choice, _RULE)
    if choice == "none":
        return None
    if not tools:
        if choice == "auto":
            return None
        raise RequestError("tool_choice asks for a tool but tools is empty", param="tool_choice")
    if isinstance(choice, str):
        is_forced = choice == "required"
        return ToolUse(tools, tools, is_forced, is_parallel and (is_asked or not is_forced))
    if choice.get("type") == "allowed_tools":
        return _take_allowed(choice, tools, is_parallel=is_parallel, is_asked=is_asked)
    return ToolUse(tools, [_find(choice, tools)], is_forced=True, is_parallel=False)


def name_of(tool: dict[str, object]) -> str:
    """Gives a tool's name."""
    function = tool["function"]
    assert isinstance(function, dict)
    return str(function["name"])


def parameters_of(tool: dict[str, object]) -> dict[str, object]:
    """Gives the schema of a tool's arguments; one that lists none takes none, as OpenAI has it."""
    function = tool["function"]
    assert isinstance(function, dict)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict) or (parameters.keys() <= _NO_ARGUMENTS and not parameters.get("properties")):
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return parameters


def _take_allowed(
    choice: dict[str, object], tools: list[dict[str, object]], *, is_parallel: bool, is_asked: bool
) -> ToolUse:
    inner = choice.get("allowed_tools")
    names = inner.get("tools") if isinstance(inner, dict) else None
    mode = inner.get("mode", "auto") if isinstance(inner, dict) else None
    if mode not in ("auto", "required") or not isinstance(names, list) or not names:
        raise RequestError(
            "tool_choice.allowed_tools must be an object with mode and a list of tools", param="tool_choice"
        )
    allowed = [_find(name, tools) for name in names]
    is_forced = mode == "required"
    return ToolUse(tools, allowed, is_forced, is_parallel and (is_asked or not is_forced))


def _find(choice: object, tools: list[dict[str, object]]) -> dict[str, object]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None and isinstance(choice, dict):
        name = choice.get("name")  # the form of the Responses API
    if not isinstance(name, str):
        raise RequestError(f"tool_choice must be {_RULE}", param="tool_choice")
    for tool in tools:
        if name_of(tool) == name:
            return tool
    raise RequestError(f"tool_choice names {shown(name)}, which is not in tools", param="tool_choice")
