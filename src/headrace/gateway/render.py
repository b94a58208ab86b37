"""Requests become token ids: chat template and tokenizer, in a few threads beside the event loop.

Length is capped in characters first, so that no hostile prompt costs more than the tokenising of the longest prompt
that could fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Protocol

from headrace.base.errors import ContextLengthError, RequestError
from headrace.gateway.generation import Stops, TextStream
from headrace.protocol.openai import ChatRequest, CompletionRequest

# No vocabulary in use spends fewer than one token on this many characters of real text; what is longer cannot fit.
CHARS_PER_TOKEN: Final = 32
_SLACK_CHARS: Final = 4096


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Gives the ids of ``text``."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of one token."""
        ...


class Template(Protocol):
    """A chat template."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Gives the prompt text of a conversation."""
        ...

    def split_kwargs(
        self, kwargs: Mapping[str, object], *, has_tools: bool = False
    ) -> tuple[dict[str, object], list[str]]:
        """Parts template variables into those that it reads and the names of the others."""
        ...


class TextKit(Protocol):
    """All that turns text into tokens and back for one model."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def template(self) -> Template:
        """The model's chat template; it refuses every conversation where the model has none."""
        ...

    def text_stream(self, *, is_text_start: bool) -> TextStream:
        """Makes an incremental detokeniser for a text of its own, or one that goes on from a prompt."""
        ...

    def stops(self, stops: Sequence[str]) -> Stops:
        """Makes a matcher of stop strings."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to run. ``text`` and ``offsets`` are there when the prompt is echoed."""

    ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


class Renderer:
    """Renders requests.

    Args:
        kit: the model's tokenizer and template.
        executor: threads to work in; the tokenizer lets the interpreter go.
    """

    def __init__(self, kit: TextKit, executor: Executor) -> None:
        self._kit = kit
        self._executor = executor

    async def render(self, request: ChatRequest | CompletionRequest, context_tokens: int) -> list[Prompt]:
        """Gives the prompts of a request, at least one.

        Raises:
            RequestError: the template refuses the conversation, or a token id is not of this model.
            ContextLengthError: the text is longer than any prompt that could fit.
        """
        loop = asyncio.get_running_loop()
        if isinstance(request, ChatRequest):
            _check_chars(sum(_chars(message) for message in request.messages), context_tokens, "messages")
            return [Prompt(await loop.run_in_executor(self._executor, self._render_chat, request))]
        for prompt in request.prompts:
            if isinstance(prompt, str):
                _check_chars(len(prompt), context_tokens, "prompt")
            elif len(prompt) >= context_tokens:
                raise context_error(len(prompt), 0, context_tokens, "prompt")
        if not request.echo and not isinstance(request.prompts[0], str):
            return [Prompt(prompt) for prompt in request.prompts if isinstance(prompt, list)]
        return await loop.run_in_executor(self._executor, self._render_prompts, request)

    def ignored_values(self, request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
        """Gives the ``chat_template_kwargs`` that this model's template does not read.

        Raises:
            RequestError: a name is reserved.
        """
        if not isinstance(request, ChatRequest) or not request.template_values:
            return ()
        ignored = self._kit.template.split_kwargs(request.template_values, has_tools=bool(request.tools))[1]
        return tuple(f"chat_template_kwargs.{name}" for name in ignored)

    def _render_chat(self, request: ChatRequest) -> list[int]:
        text = self._kit.template.render(
            request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            kwargs=request.template_values,
        )
        # The template writes the special tokens itself; adding them again would give two BOS.
        ids = self._kit.tokenizer.encode(text, add_special=request.options.add_special_tokens)
        if not ids:
            raise RequestError("messages render to an empty prompt", param="messages", code="empty_prompt")
        return ids

    def _render_prompts(self, request: CompletionRequest) -> list[Prompt]:
        prompts: list[Prompt] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = self._kit.tokenizer.encode(prompt, add_special=request.options.add_special_tokens)
                if not ids:
                    raise RequestError("prompt holds no token", param="prompt", code="empty_prompt")
            else:
                ids = prompt
            if request.echo:
                decoded, offsets = self._decode(ids)
                prompts.append(Prompt(ids, prompt if isinstance(prompt, str) else decoded, offsets))
            else:
                prompts.append(Prompt(ids))
        return prompts

    def _decode(self, ids: list[int]) -> tuple[str, tuple[int, ...]]:
        """Gives the text of ids and where each starts in it."""
        stream = self._kit.text_stream(is_text_start=True)
        texts: list[str] = []
        offsets: list[int] = []
        length = 0
        for token in ids:
            offsets.append(length)
            text = stream.push((token,))
            texts.append(text)
            length += len(text)
        texts.append(stream.flush())
        return "".join(texts), tuple(offsets)


def context_error(prompt_tokens: int, output_tokens: int, context_tokens: int, param: str) -> ContextLengthError:
    """Makes the error whose words clients look for."""
    asked = (
        f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the {param}, {output_tokens} in the completion)"
    )
    if not output_tokens:
        asked = f"{prompt_tokens} tokens in the {param}, which leaves no room for an answer"
    return ContextLengthError(
        f"This model's maximum context length is {context_tokens} tokens. However, you requested {asked}: shorten the "
        f"{param} or ask for fewer tokens.",
        param=param,
    )


def _check_chars(num_chars: int, context_tokens: int, param: str) -> None:
    limit = context_tokens * CHARS_PER_TOKEN + _SLACK_CHARS
    if num_chars > limit:
        raise ContextLengthError(
            f"This model's maximum context length is {context_tokens} tokens. However, your {param} has {num_chars} "
            f"characters, at least {num_chars // CHARS_PER_TOKEN} tokens: shorten the {param}.",
            param=param,
        )


def _chars(message: Mapping[str, object]) -> int:
    content = message.get("content")
    return (len(content) if isinstance(content, str) else 0) + 16
