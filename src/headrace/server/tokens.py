"""Endpoints that answer with tokens and not with text: tokenize, detokenize, and Anthropic's count_tokens."""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

import msgspec

from headrace.base.errors import HeadraceError, RequestError
from headrace.base.recorder import Recorder
from headrace.gateway.models import Models
from headrace.gateway.pipeline import Pipeline
from headrace.protocol.anthropic import parse_count
from headrace.protocol.fields import Fields, as_integer
from headrace.protocol.frames import Welcome
from headrace.protocol.launch import Kind
from headrace.protocol.openai import MAX_IDS, MAX_TOKEN_ID, ChatRequest, chat_from_values, parse_chat
from headrace.protocol.strict_json import decode_object
from headrace.server.exchange import Exchange
from headrace.server.ignored import IgnoredFields

# Texts longer than the context are told their length too, up to this many contexts.
_TEXT_RATIO: Final = 8
_MAX_TEXT: Final = 2**26
# The class of transformers that reads the same files.
_TOKENIZER_CLASS: Final = "PreTrainedTokenizerFast"
# What /tokenize reads beside the fields of a conversation.
_OWN_FIELDS: Final = ("return_token_strs", "with_pieces", "add_special")


_Answered = tuple[object, tuple[str, ...]]


class _Answer(Protocol):
    async def __call__(self, body: bytes) -> _Answered:
        """Gives what to answer to a body, and the fields of it that were ignored."""
        ...


class JsonEndpoint:
    """An endpoint that turns one JSON body into another.

    Args:
        name: for metrics and logs.
        answer: does it.
        max_body_bytes: the largest body.
    """

    def __init__(
        self,
        name: str,
        answer: _Answer,
        *,
        recorder: Recorder,
        max_body_bytes: int,
    ) -> None:
        self._ignored = IgnoredFields(name, recorder)
        self._answer = answer
        self._max_body_bytes = max_body_bytes

    async def __call__(self, exchange: Exchange) -> None:
        """Answers one request."""
        try:
            value, ignored = await self._answer(await exchange.read_body(self._max_body_bytes))
            await exchange.answer(200, msgspec.json.encode(value), self._ignored.note(ignored))
        except HeadraceError as error:
            await exchange.answer_error(error)


class TokenPages:
    """What the endpoints answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def tokenize(self, body: bytes) -> _Answered:
        """``POST /tokenize``: a prompt's or a conversation's token ids (vLLM's form; llama.cpp's ``content`` too)."""
        fields = Fields(decode_object(body))
        pipeline, identity = self._find(fields)
        context_tokens = pipeline.context_tokens(identity)
        has_texts = fields.flag("return_token_strs")
        has_pieces = fields.flag("with_pieces")
        prompt = fields.text("prompt", _MAX_TEXT)
        if prompt is None:
            prompt = fields.text("content", _MAX_TEXT)
        ignored: tuple[str, ...]
        if prompt is not None:
            add_special = fields.flag("add_special_tokens", default=fields.flag("add_special", default=True))
            ignored = fields.unknown()
            ids = await pipeline.renderer.encode(
                prompt, add_special=add_special, limit_tokens=_TEXT_RATIO * context_tokens
            )
        elif fields.take("messages") is not None:
            values = decode_object(body)
            for name in _OWN_FIELDS:
                values.pop(name, None)
            request = chat_from_values(values)
            ignored = request.options.ignored_fields
            ids = await _render(pipeline, request, context_tokens)
        else:
            raise RequestError("prompt or messages is required", param="prompt", code="missing_required")
        tokenizer = pipeline.kit.tokenizer
        answer = {"count": len(ids), "max_model_len": context_tokens, "token_strs": None}
        if has_pieces:  # llama.cpp's form
            pieces = [{"id": index, "piece": _piece(tokenizer.token_bytes(index))} for index in ids]
            return {**answer, "tokens": pieces}, ignored
        texts = [tokenizer.token_text(index) for index in ids] if has_texts else None
        return {**answer, "tokens": ids, "token_strs": texts}, ignored

    async def detokenize(self, body: bytes) -> _Answered:
        """``POST /detokenize``: the text of token ids, special tokens written out."""
        fields = Fields(decode_object(body))
        pipeline, identity = self._find(fields)
        is_named = fields.take("model") is not None
        items = fields.items("tokens", MAX_IDS)
        if items is None:
            raise fields.missing("tokens")
        ids = [token for item in items if (token := as_integer(item)) is not None and 0 <= token <= MAX_TOKEN_ID]
        if len(ids) != len(items) or any(token >= identity.vocab_size for token in ids):
            raise RequestError(
                f"tokens must hold token ids of this model, from 0 to {identity.vocab_size - 1}", param="tokens"
            )
        stream = pipeline.kit.text_stream(is_text_start=True, skip_special=False)
        text = stream.push(ids) + stream.flush()
        # Clients of llama.cpp's server name no model and read its field.
        return {"prompt": text} | ({} if is_named else {"content": text}), fields.unknown()

    async def count_chat(self, body: bytes) -> _Answered:
        """``POST /v1/chat/completions/input_tokens``: how many tokens a conversation is (llama.cpp's route)."""
        return await self._count(parse_chat(body))

    async def count_message(self, body: bytes) -> _Answered:
        """``POST /v1/messages/count_tokens``."""
        return await self._count(parse_count(body))

    async def _count(self, request: ChatRequest) -> _Answered:
        pipeline = self._models.find(request.options.model, Kind.GENERATE)
        context_tokens = pipeline.context_tokens(pipeline.check_ready())
        ignored = request.options.ignored_fields + pipeline.renderer.ignored_values(request)
        return {"input_tokens": len(await _render(pipeline, request, context_tokens))}, ignored

    def info(self, name: str | None) -> dict[str, object]:
        """Gives what ``GET /tokenizer_info`` answers about the named model, or the only one."""
        pipeline = self._models.find(name)
        identity = pipeline.check_ready()
        kit = pipeline.kit
        marks = kit.dialect.marks
        return {
            "model": pipeline.name,
            "tokenizer_class": _TOKENIZER_CLASS,
            "vocab_size": identity.vocab_size,
            "max_model_len": pipeline.context_tokens(identity),
            "special_tokens": kit.special_tokens,
            "eos_token_ids": identity.eos_token_ids,
            "has_chat_template": kit.has_chat_template,
            "tool_format": kit.dialect.form.name,
            "reasoning_marks": None if marks is None else [marks.opening, marks.closing],
        }

    def _find(self, fields: Fields) -> tuple[Pipeline, Welcome]:
        pipeline = self._models.find(fields.text("model", 256))
        return pipeline, pipeline.check_ready()


async def _render(pipeline: Pipeline, request: ChatRequest, context_tokens: int) -> list[int]:
    options = dataclasses.replace(request.options, truncate_prompt_tokens=None)
    request = dataclasses.replace(request, options=options)
    (prompt,) = await pipeline.renderer.render(request, _TEXT_RATIO * context_tokens)
    return prompt.ids


def _piece(raw: bytes) -> str | list[int]:
    """Gives a token's text, or its bytes where they are no whole characters."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
