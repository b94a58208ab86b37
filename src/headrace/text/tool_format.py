"""How a model writes its tool calls: one value per family, chosen from its chat template.

    hermes    <tool_call>{"name": …, "arguments": …}</tool_call>            Hermes 2 and 3, Qwen 2.5 and 3
    llama3    {"name": …, "parameters": …}, or after <|python_tag|>          Llama 3.1 and later
    mistral   [TOOL_CALLS][{"name": …, "arguments": …}], or name{…}          Mistral
    gemma     <start_function_call>call:name{…}<end_function_call>           FunctionGemma; Gemma 4's marks
    generic   hermes' form, or bare or fenced JSON                           everything else

A template that shows no tools gets them as a system message (``tool_prompt``) and answers in the generic form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.protocol.tool_use import ToolUse, name_of, parameters_of
from headrace.text.schema import prepare

# A forced answer of several calls ends here, so that a small model cannot repeat itself for ever.
_MAX_FORCED_CALLS: Final = 8


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    Args:
        openers: marks that begin calls, and the mark that may end them.
        kept_tokens: special tokens of the vocabulary that are part of the form, so they must not be left out.
        has_bare_calls: an answer may begin with the JSON itself.
        has_inner_calls: the JSON itself may also stand behind other text.
        has_names: a bare name may stand before its arguments (Mistral's newer form).
        quote: the mark around texts, for Gemma's form; empty for JSON.
        head, middle, tail: what stands around a forced call: ``head`` name ``middle`` arguments ``tail``.
        before, between, after: what stands around all forced calls.
    """

    name: str
    openers: dict[str, str]
    kept_tokens: tuple[str, ...] = ()
    has_bare_calls: bool = False
    has_inner_calls: bool = False
    has_names: bool = False
    quote: str = ""
    head: str = '{"name": '
    middle: str = ', "arguments": '
    tail: str = "}"
    before: str = ""
    between: str = "; "
    after: str = ""


_TAGGED: Final = {"<tool_call>": "</tool_call>"}
HERMES: Final = ToolFormat(
    "hermes",
    _TAGGED,
    kept_tokens=("<tool_call>", "</tool_call>"),
    head='<tool_call>\n{"name": ',
    tail="}\n</tool_call>",
    between="\n",
)
LLAMA3: Final = ToolFormat(
    "llama3",
    {"<|python_tag|>": ""},
    kept_tokens=("<|python_tag|>",),
    has_bare_calls=True,
    has_inner_calls=True,
    middle=', "parameters": ',
)
MISTRAL: Final = ToolFormat(
    "mistral",
    {"[TOOL_CALLS]": ""},
    kept_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    has_names=True,
    before="[",
    between=", ",
    after="]",
)
FUNCTION_GEMMA: Final = ToolFormat(
    "gemma",
    {"<start_function_call>": "<end_function_call>"},
    kept_tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    quote="<escape>",
)
GEMMA4: Final = ToolFormat(
    "gemma",
    {"<|tool_call>": "<tool_call|>"},
    kept_tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    quote='<|"|>',
)
GENERIC: Final = ToolFormat(
    "generic",
    _TAGGED,
    kept_tokens=("<tool_call>", "</tool_call>"),
    has_bare_calls=True,
    head='<tool_call>\n{"name": ',
    tail="}\n</tool_call>",
    between="\n",
)


def choose_format(templates: Sequence[str]) -> ToolFormat:
    """Gives the form that a model's chat templates show."""
    text = "\n".join(templates)
    if "[TOOL_CALLS]" in text:
        return MISTRAL
    if "<start_function_call>" in text:
        return FUNCTION_GEMMA
    if "<|tool_call>" in text:
        return GEMMA4
    if "<tool_call>" in text:
        return HERMES
    if "<|python_tag|>" in text or ("<|start_header_id|>" in text and '"parameters"' in text):
        return LLAMA3
    return GENERIC


def calls_lark(form: ToolFormat, use: ToolUse, schema: object = None) -> str:
    """Gives the Lark grammar of an answer that is made of calls.

    Args:
        schema: where it is not None, the answer may instead be JSON of this schema.
    """
    rules = []
    for index, tool in enumerate(use.callable_tools):
        head = form.head + json.dumps(name_of(tool), ensure_ascii=False) + form.middle
        rules.append(f"c{index}: {_literal(head)} a{index} {_literal(form.tail)}")
        rules.append(f"a{index}: %json {json.dumps(prepare(parameters_of(tool)))}")
    calls = "call"
    if use.is_parallel:
        calls += f" ({_literal(form.between)} call){{0,{_MAX_FORCED_CALLS - 1}}}"
    before, after = _literal(form.before), _literal(form.after)
    start = f"{before} {calls} {after}".strip()
    if schema is not None:
        rules.append(f"content: %json {json.dumps(prepare(schema))}")
        start = f"calls | content\ncalls: {start}"
    names = " | ".join(f"c{index}" for index in range(len(use.callable_tools)))
    return "\n".join([f"start: {start}", f"call: {names}", *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
