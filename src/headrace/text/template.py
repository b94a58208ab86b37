"""Chat messages to the text that a model was trained to read: its own chat template, run in a sandbox.

What lives here: where templates come from, the form that each wants its messages in, and what a failure means to the
caller. The template itself runs in ``sandbox_child``. ``render`` blocks about a millisecond and belongs in a thread.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, assert_never

from headrace.base.errors import ModelError, ModelFormatError, ModelUnsupportedError, RequestError
from headrace.text.sandbox import JobError, Sandbox, SandboxError, SandboxLimits
from headrace.text.tokenizer import read_json_object

# The longest of 70 real templates has 16,448 bytes.
MAX_TEMPLATE_CHARS: Final = 256 * 2**10
MAX_TEMPLATES: Final = 16
MAX_VARIABLE_CHARS: Final = 4096

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_RESERVED: Final = frozenset(
    {
        "messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message",
        "chat_template", "tokenize", "raise_exception", "strftime_now", "bos_token", "eos_token", "unk_token",
        "sep_token", "pad_token", "cls_token", "mask_token", "self", "loop", "range", "dict", "namespace",
    }
)  # fmt: skip


def find_templates_in_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Gives a model folder's templates by name: ``chat_template.jinja``, else those of ``tokenizer_config.json``.

    Raises:
        ModelFormatError: a file is malformed or a template too long.
    """
    if "chat_template.jinja" in files:
        path = files["chat_template.jinja"]
        try:
            size = path.stat().st_size
            text = path.read_text("utf-8") if size <= 4 * MAX_TEMPLATE_CHARS else "x" * (MAX_TEMPLATE_CHARS + 1)
        except (OSError, UnicodeDecodeError) as fault:
            raise ModelFormatError(f"{path}: cannot be read: {fault}") from fault
        return _check({_DEFAULT: text})
    if "tokenizer_config.json" not in files:
        return {}
    value = read_json_object(files["tokenizer_config.json"]).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return _check({_DEFAULT: value})
    if isinstance(value, list):
        pairs = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        return _check(pairs)
    raise ModelFormatError(f"chat_template is {type(value).__name__}, it must be text or a list of named templates")


def find_templates_in_gguf(metadata: Mapping[str, object]) -> dict[str, str]:
    """Gives a GGUF file's templates by name: ``tokenizer.chat_template`` and ``tokenizer.chat_template.<name>``.

    Raises:
        ModelFormatError: a template is not text or too long.
    """
    key = "tokenizer.chat_template"
    found: dict[object, object] = {_DEFAULT: metadata[key]} if key in metadata else {}
    found |= {name[len(key) + 1 :]: value for name, value in metadata.items() if name.startswith(key + ".")}
    return _check(found)


def _check(found: Mapping[object, object]) -> dict[str, str]:
    if len(found) > MAX_TEMPLATES:
        raise ModelFormatError(f"the model has {len(found)} chat templates, the limit is {MAX_TEMPLATES}")
    checked: dict[str, str] = {}
    for name, text in found.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ModelFormatError(f"the chat template {name!r} is {type(text).__name__}, it must be text")
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ModelFormatError(f"the chat template {name!r} is over {MAX_TEMPLATE_CHARS} characters long")
        checked[name] = text
    return checked


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What one template reads, found by trying it.

    Args:
        variables: its free variables: what a request may set by ``chat_template_kwargs``.
        wants_parts: it shows content only as a list of parts.
        wants_string_arguments: it shows a tool call's arguments only as JSON text, not as an object.
        takes_tools: it shows the tools that it is given.
    """

    variables: frozenset[str]
    wants_parts: bool
    wants_string_arguments: bool
    takes_tools: bool


class ChatTemplate:
    """A model's chat templates, compiled in a child process of their own.

    Args:
        sources: template name to source (``find_templates_in_files`` or ``…_in_gguf``); may be empty.
        special_tokens: ``bos_token`` … to their text; ``use`` gives them later where they are not known yet.
        now: gives the local time, for templates that write the date.

    Raises:
        ModelFormatError: a template is not a template.
        ModelUnsupportedError: a template costs too much to compile.
        MachineError: the child process cannot be started.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        now: Callable[[], datetime],
        limits: SandboxLimits = SandboxLimits(),  # noqa: B008 (frozen)
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._limits = limits
        self._sandbox = Sandbox(dict(sources), limits)
        self._forms: dict[str, TemplateForm] = {}
        if not sources:
            return
        try:
            loaded = self._sandbox.load()
        except SandboxError as fault:
            self._sandbox.close()
            raise _as_model_error(fault) from fault
        for name, form in loaded.items():
            self._forms[name] = TemplateForm(
                variables=frozenset(form["variables"]) - _RESERVED,
                wants_parts=form["wants_parts"],
                wants_string_arguments=form["wants_string_arguments"],
                takes_tools=form["takes_tools"],
            )

    def use(self, special_tokens: Mapping[str, str]) -> None:
        """Renders with these special tokens from now on."""
        self._special_tokens = dict(special_tokens)

    @property
    def is_present(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._forms)

    @property
    def child_pid(self) -> int | None:
        """The rendering process's id, for ``status`` and tests."""
        return self._sandbox.pid

    def form(self, *, has_tools: bool) -> TemplateForm:
        """Gives what the template reads that ``render`` would take.

        Raises:
            RequestError: the model has no chat template.
        """
        return self._forms[self._choose(has_tools)]

    def split_kwargs(
        self, kwargs: Mapping[str, object], *, has_tools: bool = False
    ) -> tuple[dict[str, object], list[str]]:
        """Parts ``chat_template_kwargs`` into what the template reads and the names of what it does not.

        Raises:
            RequestError: a name is reserved, or a value is no plain one.
        """
        for name, value in kwargs.items():
            if name in _RESERVED or name.startswith("_"):
                raise RequestError(
                    f"chat_template_kwargs.{name[:80]} is set by the server", param=f"chat_template_kwargs.{name[:80]}"
                )
            if value is not None and not isinstance(value, str | int | float):
                raise RequestError(
                    f"chat_template_kwargs.{name[:80]} is {type(value).__name__}: use text, a number or true or false",
                    param=f"chat_template_kwargs.{name[:80]}",
                )
            if isinstance(value, str) and len(value) > MAX_VARIABLE_CHARS:
                raise RequestError(
                    f"chat_template_kwargs.{name[:80]} has {len(value)} characters, the limit is {MAX_VARIABLE_CHARS}",
                    param=f"chat_template_kwargs.{name[:80]}",
                )
        known = self._forms[self._choose(has_tools)].variables
        return {name: value for name, value in kwargs.items() if name in known}, sorted(kwargs.keys() - known)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Gives the prompt, to be encoded without further special tokens.

        Args:
            messages: OpenAI's form; content may be text, text parts or None, arguments text or an object.
            tools: OpenAI's function tools, or None.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: leave the last message open, for the model to go on with.
            kwargs: ``chat_template_kwargs``; what the template does not read is left out.

        Raises:
            RequestError: no template, or it refuses these messages, fails on them or costs too much.
            OverloadedError, MachineError: see ``Sandbox.render``.
        """
        name = self._choose(bool(tools))
        form = self._forms[name]
        variables = self.split_kwargs(kwargs or {}, has_tools=bool(tools))[0]
        turns = [_to_form(message, form) for message in messages]
        mark = ""
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message are both set: choose one",
                    param="continue_final_message",
                )
            mark = _mark_end(turns)
        variables |= {
            **self._special_tokens,
            "messages": turns,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        moment = self._now()
        try:
            text = self._sandbox.render(name, variables, list(moment.timetuple()[:6]))
        except SandboxError as fault:
            raise self._as_request_error(fault) from fault
        return _cut_at(text, mark) if mark else text

    def close(self) -> None:
        """Ends the child process."""
        self._sandbox.close()

    def _choose(self, has_tools: bool) -> str:
        if has_tools and _TOOL_USE in self._forms:
            return _TOOL_USE
        if _DEFAULT in self._forms:
            return _DEFAULT
        if self._forms:
            return min(self._forms)
        raise RequestError(
            "this model has no chat template, so it cannot read messages",
            code="chat_template_missing",
            param="messages",
            hint="use /v1/completions with a prompt, or put a chat_template.jinja beside the model",
        )

    def _as_request_error(self, fault: SandboxError) -> RequestError:
        limits = self._limits
        match fault.kind:
            case JobError.REFUSED:
                return RequestError(
                    f"the model's chat template refuses these messages: {fault.message}",
                    code="template_refused",
                    param="messages",
                )
            case JobError.FAILED | JobError.SYNTAX:
                return RequestError(
                    f"the model's chat template cannot render these messages: {fault.message}",
                    code="template_failed",
                    param="messages",
                )
            case JobError.TIME:
                what = f"took over {limits.cpu_s * 1000:.0f} ms"
            case JobError.MEMORY:
                what = f"took over {limits.memory_bytes // 2**20} MiB of memory"
            case JobError.OUTPUT:
                what = f"wrote over {limits.output_chars} + {limits.output_ratio} × the request's bytes characters"
            case _:
                assert_never(fault.kind)
        return RequestError(
            f"the model's chat template {what} on these messages: send fewer or shorter ones",
            code="template_too_expensive",
            param="messages",
        )


def _as_model_error(fault: SandboxError) -> ModelError:
    if fault.kind in (JobError.SYNTAX, JobError.FAILED, JobError.REFUSED):
        return ModelFormatError(f"the model's chat template is malformed: {fault.message}")
    return ModelUnsupportedError(
        f"the model's chat template takes too much {fault.kind} to compile",
        hint="read the template before you trust it",
    )


def _to_form(message: Mapping[str, object], form: TemplateForm) -> dict[str, object]:
    turn = dict(message)
    text = _as_text(message.get("content"))
    turn["content"] = [{"type": "text", "text": text}] if form.wants_parts else text
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        turn["tool_calls"] = [_call_to_form(call, form) for call in calls]
    return turn


def _as_text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise RequestError("content must be text or a list of text parts", param="messages")


def _call_to_form(call: object, form: TemplateForm) -> object:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError("a tool call must have a function", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if form.wants_string_arguments and isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not form.wants_string_arguments and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None  # not JSON: the template shows it as it is
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "function": function}


def _mark_end(turns: list[dict[str, object]]) -> str:
    """Puts a mark that no client can know at the end of the last message, and gives it."""
    if not turns:
        raise RequestError("continue_final_message is set, but there is no message", param="continue_final_message")
    mark = f"[end-{secrets.token_hex(16)}]"
    last = turns[-1]
    content = last["content"]
    # The space shows whether the template trims the message's end.
    if isinstance(content, list):
        last["content"] = [{"type": "text", "text": content[0]["text"] + mark + " "}]
    else:
        last["content"] = f"{content}{mark} "
    return mark


def _cut_at(text: str, mark: str) -> str:
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError(
            "the model's chat template leaves the final message out, so it cannot be continued",
            code="template_refused",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
