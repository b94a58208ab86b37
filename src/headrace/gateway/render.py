"""Requests become token ids: chat template and tokenizer, in a few threads beside the event loop.

The tokenizer spends little on a text that cannot fit, so no hostile prompt costs more than the longest that could.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Protocol

from headrace.base.errors import ContextLengthError, RequestError
from headrace.gateway.generation import Stops, TextStream
from headrace.protocol.openai import REASONING_EFFORT, ChatRequest, CompletionRequest
from headrace.text.message import Dialect
from headrace.text.tool_prompt import has_tool_turns, write_tools

# A prompt that is to be cut may be this many times the context; what is longer costs too much to look at.
_CUT_RATIO: Final = 8
MAX_BAD_WORD_TOKENS: Final = 1024


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode_within(self, text: str, *, add_special: bool, limit_tokens: int, param: str) -> list[int]:
        """Gives the ids of ``text``, of which there are at most ``limit_tokens``."""
        ...

    def encode_start(self, text: str, limit_tokens: int) -> list[int]:
        """Gives at most ``limit_tokens`` ids of the text's beginning, special ones among them."""
        ...

    def encode_pair(self, first: str, second: str, limit_tokens: int, *, is_cut: bool) -> tuple[list[int], int]:
        """Gives the ids of two texts as one input, and where the second one's begin."""
        ...

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Gives the ids of a text, special ones among them, and where each stands in it."""
        ...

    def mask_token_id(self) -> int | None:
        """Gives the id of the token that hides another one, None where there is none."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Gives the text of ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of one token."""
        ...

    def token_text(self, index: int) -> str:
        """Gives a token as the vocabulary writes it."""
        ...


class Form(Protocol):
    """What a chat template reads."""

    @property
    def takes_tools(self) -> bool:
        """Whether it shows the tools that it is given."""
        ...


class Template(Protocol):
    """A chat template."""

    def form(self, *, has_tools: bool) -> Form:
        """Gives what the template reads that ``render`` would take."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
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

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token`` … to their text."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        ...

    @property
    def dialect(self) -> Dialect:
        """How the model writes thoughts and tool calls."""
        ...

    def text_stream(self, *, is_text_start: bool, skip_special: bool = True, is_message: bool = False) -> TextStream:
        """Makes an incremental detokeniser for a text of its own, or one that goes on from a prompt."""
        ...

    def stops(self, stops: Sequence[str]) -> Stops:
        """Makes a matcher of stop strings."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to run. ``text`` and ``offsets`` are there when the prompt is echoed.

    Args:
        is_thinking: it ends inside the model's thinking.
        truncated_tokens: how many of its tokens were cut, as the client asked.
    """

    ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()
    is_thinking: bool = False
    truncated_tokens: int = 0


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
            return [await loop.run_in_executor(self._executor, self._render_chat, request, context_tokens)]
        if request.options.truncate_prompt_tokens is None:
            for prompt in request.prompts:
                if len(prompt) >= context_tokens and not isinstance(prompt, str):
                    raise context_error(len(prompt), 0, context_tokens, "prompt")
        if not request.echo and not isinstance(request.prompts[0], str):
            return [_cut(prompt, request, context_tokens) for prompt in request.prompts if isinstance(prompt, list)]
        return await loop.run_in_executor(self._executor, self._render_prompts, request, context_tokens)

    async def encode(self, text: str, *, add_special: bool, limit_tokens: int) -> list[int]:
        """Gives the ids of a text.

        Raises:
            RequestError: there are more than ``limit_tokens``.
        """

        def work() -> list[int]:
            return self._kit.tokenizer.encode_within(
                text, add_special=add_special, limit_tokens=limit_tokens, param="prompt"
            )

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def bad_words(self, request: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Gives the token sequences of ``bad_words``: each word as a text begins with it, and behind a blank.

        A word may still come out in other tokens; vLLM's ``bad_words`` are these same sequences.
        """
        words = request.options.bad_words
        if not words:
            return []

        def work() -> list[list[int]]:
            sequences: list[list[int]] = []
            for word in words:
                first = self._word_ids(word.lstrip())
                later = self._word_ids(" " + word.lstrip())
                sequences.append(first)
                # Of the same length and with another first token, or a lone blank would be forbidden too.
                if len(later) == len(first) and later[0] != first[0]:
                    sequences.append(later)
            return sequences

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _word_ids(self, text: str) -> list[int]:
        ids = self._kit.tokenizer.encode_within(
            text, add_special=False, limit_tokens=MAX_BAD_WORD_TOKENS, param="bad_words"
        )
        if not ids:
            raise RequestError("bad_words holds a word without tokens", param="bad_words")
        return ids

    def ignored_values(self, request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
        """Gives the ``chat_template_kwargs``, and ``reasoning_effort``, that this model's template does not read.

        Raises:
            RequestError: a name is reserved.
        """
        if not isinstance(request, ChatRequest) or not request.template_values:
            return ()
        ignored = self._kit.template.split_kwargs(request.template_values, has_tools=bool(request.tools))[1]
        return tuple(name if name == REASONING_EFFORT else f"chat_template_kwargs.{name}" for name in ignored)

    def _render_chat(self, request: ChatRequest, context_tokens: int) -> Prompt:
        text = self._chat_text(request)
        # The template writes the special tokens itself; adding them again would give two BOS.
        ids = self._encode(text, request, context_tokens, "messages")
        if not ids:
            raise RequestError("messages render to an empty prompt", param="messages", code="empty_prompt")
        cut = _cut(ids, request, context_tokens)
        echoed = ""
        if request.echo and request.continue_final_message:
            echoed = str(request.messages[-1].get("content", ""))
        return Prompt(
            cut.ids,
            text=echoed,
            is_thinking=self._kit.dialect.is_thinking(text),
            truncated_tokens=cut.truncated_tokens,
        )

    def _chat_text(self, request: ChatRequest) -> str:
        template = self._kit.template
        tools = request.tools.tools if request.tools is not None else None

        def render(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None) -> str:
            return template.render(
                messages,
                tools=tools,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                kwargs=request.template_values,
            )

        messages = request.messages
        if not tools and not has_tool_turns(messages):
            return render(messages, None)
        if template.form(has_tools=True).takes_tools:
            return render(messages, tools)
        try:
            return render(write_tools(messages, tools), None)
        except RequestError as error:
            if error.stable_code != "template_refused":
                raise
            return render(write_tools(messages, tools, has_system=False), None)

    def _encode(
        self, text: str, request: ChatRequest | CompletionRequest, context_tokens: int, param: str
    ) -> list[int]:
        is_cut = request.options.truncate_prompt_tokens is not None
        return self._kit.tokenizer.encode_within(
            text,
            add_special=request.options.add_special_tokens,
            limit_tokens=context_tokens * (_CUT_RATIO if is_cut else 1),
            param=param,
        )

    def _render_prompts(self, request: CompletionRequest, context_tokens: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = self._encode(prompt, request, context_tokens, "prompt")
                if not ids:
                    raise RequestError("prompt holds no token", param="prompt", code="empty_prompt")
            else:
                ids = prompt
            cut = _cut(ids, request, context_tokens)
            if request.echo:
                text, offsets = self._decode(cut.ids)
                if isinstance(prompt, str) and not cut.truncated_tokens:
                    # Special tokens that the tokenizer put before it are no part of what the client sent.
                    num_added = len(text) - len(prompt) if text.endswith(prompt) else 0
                    text, offsets = prompt, tuple(max(0, offset - num_added) for offset in offsets)
                cut = Prompt(cut.ids, text, offsets, truncated_tokens=cut.truncated_tokens)
            prompts.append(cut)
        return prompts

    def _decode(self, ids: list[int]) -> tuple[str, tuple[int, ...]]:
        """Gives the text of ids, special ones written out, and where each starts in it."""
        stream = self._kit.text_stream(is_text_start=True, skip_special=False)
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


def _cut(ids: list[int], request: ChatRequest | CompletionRequest, context_tokens: int) -> Prompt:
    """Gives the last tokens of a prompt where the client asked for no more, else all."""
    limit = request.options.truncate_prompt_tokens
    if limit is None:
        return Prompt(ids)
    if limit == 0:  # as many as leave room for the answer
        limit = max(1, context_tokens - (request.options.max_tokens or 1))
    kept = ids[:limit] if request.options.is_cut_at_end else ids[-limit:]
    return Prompt(kept, truncated_tokens=max(0, len(ids) - limit))


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
