"""What the mock says: the bodies and frames of its answers, in OpenAI's form. No timing here, no sockets."""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

from headrace.bench.mock.script import ErrorRule, FaultRule, Script

Kind = Literal["chat", "completions", "embeddings", "rerank"]
KINDS: Final[dict[str, Kind]] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
}
_DEFAULT_TOKENS: Final = 16
_Rule = TypeVar("_Rule", ErrorRule, FaultRule)


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Asked(msgspec.Struct):
    """The fields of a request that the mock heeds; it ignores all others."""

    model: str = ""
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    messages: list[dict[str, object]] | None = None
    prompt: str | list[int | str | list[int]] | None = None
    input: str | list[int | str | list[int]] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    query: str = ""
    documents: list[str | dict[str, object]] = []
    top_n: int | None = None


_ASKED: Final = msgspec.json.Decoder(Asked)
_ENCODE: Final = msgspec.json.Encoder().encode
_REQUIRED: Final[dict[Kind, str]] = {
    "chat": "messages",
    "completions": "prompt",
    "embeddings": "input",
    "rerank": "documents",
}


def read_asked(kind: Kind, body: bytes) -> Asked:
    """Reads a request.

    Raises:
        ValueError: it is no JSON object, a field has the wrong type, or the one that matters is missing.
    """
    asked = _ASKED.decode(body)
    if not getattr(asked, _REQUIRED[kind]):
        raise ValueError(f"{_REQUIRED[kind]} is missing or empty")
    return asked


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request will go.

    Args:
        due_s: when each write of a stream is due, after the request's arrival; one entry where it is not streamed.
        chunks: of each write: how many tokens each of its events carries.
    """

    error: ErrorRule | None
    fault: FaultRule | None
    num_tokens: int
    due_s: tuple[float, ...]
    chunks: tuple[tuple[int, ...], ...]


def make_plan(script: Script, number: int, kind: Kind, asked: Asked) -> Plan:
    """Draws how request ``number`` goes; the same number and seed give the same."""
    rng = random.Random(script.seed << 32 | number)  # noqa: S311 - a script that repeats itself is the point
    error = _pick(script.errors, rng.random())
    fault = _pick(script.faults, rng.random())
    ttft_s = script.ttft_ms.draw(rng) / 1e3
    if kind in ("embeddings", "rerank"):
        return Plan(error, fault, 0, (ttft_s,), ())
    asked_tokens = asked.max_completion_tokens or asked.max_tokens
    drawn = None if script.tokens is None else max(1, round(script.tokens.draw(rng)))
    num_tokens = min(n for n in (asked_tokens, drawn) if n is not None) if asked_tokens or drawn else _DEFAULT_TOKENS
    itl = script.itl_ms
    if itl.is_constant:
        token_s = [ttft_s + index * itl.first / 1e3 for index in range(num_tokens)]
    else:
        token_s = [ttft_s]
        for _ in range(num_tokens - 1):
            token_s.append(token_s[-1] + itl.draw(rng) / 1e3)
    if not asked.stream:
        return Plan(error, fault, num_tokens, (token_s[-1],), ())
    size = script.tokens_per_chunk
    chunks = [(start, min(size, num_tokens - start)) for start in range(0, num_tokens, size)]
    due, writes = [], []
    for start in range(0, len(chunks), script.chunks_per_write):
        group = chunks[start : start + script.chunks_per_write]
        due.append(token_s[group[-1][0]])
        writes.append(tuple(count for _, count in group))
    return Plan(error, fault, num_tokens, tuple(due), tuple(writes))


def _pick(rules: tuple[_Rule, ...], drawn: float) -> _Rule | None:
    for rule in rules:
        if drawn < rule.ratio:
            return rule
        drawn -= rule.ratio
    return None


def count_prompt(kind: Kind, asked: Asked) -> int:
    """Gives the prompt's tokens: its words, or its token ids."""
    if kind == "chat":
        return sum(_count(message.get("content")) for message in asked.messages or ())
    if kind == "rerank":
        return len(asked.documents) * _count(asked.query) + sum(_count(document) for document in asked.documents)
    return _count(asked.prompt if kind == "completions" else asked.input)


def _count(value: object) -> int:
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list):
        return sum(_count(item) for item in value)
    if isinstance(value, dict):
        return _count(value.get("text"))
    return 1 if isinstance(value, int) else 0


class Frames:
    """Makes the events of one stream.

    Args:
        created: the Unix time that the answer carries.
    """

    __slots__ = ("_asked", "_head", "_kind", "_num_prompt", "_script", "_tail", "_words")

    def __init__(self, script: Script, kind: Kind, number: int, asked: Asked, *, created: int) -> None:
        self._script = script
        self._kind: Kind = kind
        self._asked = asked
        self._num_prompt = count_prompt(kind, asked)
        self._words = script.words
        model = asked.model or script.models[0]
        name, shape = ("chatcmpl", "chat.completion.chunk") if kind == "chat" else ("cmpl", "text_completion")
        head = {"id": f"{name}-mock{number}", "object": shape, "created": created, "model": model}
        self._head = b"data: " + _ENCODE(head)[:-1]
        self._tail = b',"finish_reason":null}]}\n\n'

    def role(self) -> bytes:
        """Gives the event that opens a chat; nothing for a completion."""
        if self._kind != "chat":
            return b""
        return self._head + b',"choices":[{"index":0,"delta":{"role":"assistant","content":""}' + self._tail

    def tokens(self, start: int, count: int) -> bytes:
        """Gives the event with tokens ``start`` to ``start + count``."""
        text = _ENCODE(text_of(self._words, start, count))
        if self._kind == "chat":
            return self._head + b',"choices":[{"index":0,"delta":{"content":' + text + b"}" + self._tail
        return self._head + b',"choices":[{"index":0,"text":' + text + self._tail

    def last(self, num_tokens: int, *, has_done: bool) -> bytes:
        """Gives the events that close the stream: why it ended, the usage where wanted, ``[DONE]``."""
        reason = _finish_reason(self._asked, num_tokens)
        content = b'"delta":{}' if self._kind == "chat" else b'"text":""'
        frames = (
            self._head + b',"choices":[{"index":0,' + content + b',"finish_reason":"' + reason.encode() + b'"}]}\n\n'
        )
        is_asked = self._asked.stream_options is not None and self._asked.stream_options.include_usage
        if self._script.usage == "always" or (self._script.usage == "asked" and is_asked):
            frames += self._head + b',"choices":[],"usage":' + _ENCODE(usage(self._num_prompt, num_tokens)) + b"}\n\n"
        return frames + (b"data: [DONE]\n\n" if has_done else b"")


def text_of(words: tuple[str, ...], start: int, count: int) -> str:
    """Gives tokens ``start`` to ``start + count`` of an answer: words, a space before each but the first."""
    text = " ".join(words[index % len(words)] for index in range(start, start + count))
    return text if start == 0 else f" {text}"


def usage(num_prompt: int, num_tokens: int) -> dict[str, int]:
    """Gives the usage block."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_tokens, "total_tokens": num_prompt + num_tokens}


def _finish_reason(asked: Asked, num_tokens: int) -> str:
    return "length" if num_tokens == (asked.max_completion_tokens or asked.max_tokens) else "stop"


def whole_answer(script: Script, kind: Kind, number: int, asked: Asked, plan: Plan, *, created: int) -> bytes:
    """Gives the body of an answer that is not streamed."""
    model = asked.model or script.models[0]
    num_prompt = count_prompt(kind, asked)
    match kind:
        case "embeddings":
            items = _as_texts(asked.input)
            vectors: list[object] = []
            for item in items:
                vector = make_vector(item, script.embedding_size)
                packed = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
                vectors.append(packed if asked.encoding_format == "base64" else vector)
            data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
            sums = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
            return _ENCODE({"object": "list", "data": data, "model": model, "usage": sums})
        case "rerank":
            scores = [(make_vector(f"{asked.query}\n{text}", 1)[0], at) for at, text in enumerate(asked.documents)]
            scores.sort(reverse=True)
            results = [{"index": at, "relevance_score": (score + 1) / 2} for score, at in scores[: asked.top_n]]
            sums = {"prompt_tokens": num_prompt, "total_tokens": num_prompt}
            return _ENCODE({"id": f"rerank-mock{number}", "model": model, "results": results, "usage": sums})
        case "chat" | "completions":
            text = text_of(script.words, 0, plan.num_tokens)
            choice: dict[str, object] = {"index": 0, "finish_reason": _finish_reason(asked, plan.num_tokens)}
            choice |= {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
            name, shape = ("chatcmpl", "chat.completion") if kind == "chat" else ("cmpl", "text_completion")
            answer = {"id": f"{name}-mock{number}", "object": shape, "created": created, "model": model}
            sums = usage(num_prompt, plan.num_tokens)
            return _ENCODE(answer | {"choices": [choice]} | ({} if script.usage == "never" else {"usage": sums}))


def _as_texts(value: object) -> list[str]:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [str(item) for item in value]
    return [str(value)]


def make_vector(text: str, size: int) -> list[float]:
    """Gives a vector of length ``size`` that depends on the text alone, each number in [-1, 1)."""
    made = hashlib.shake_128(text.encode()).digest(2 * size)
    return [number / 32768 for number in struct.unpack(f"<{size}h", made)]


def error_body(status: int, message: str) -> bytes:
    """Gives an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _ENCODE({"error": {"message": message, "type": kind, "param": None, "code": f"mock_{status}"}})


def models_body(script: Script, *, created: int) -> bytes:
    """Gives the list of models."""
    data = [{"id": name, "object": "model", "created": created, "owned_by": "mock"} for name in script.models]
    return _ENCODE({"object": "list", "data": data})
