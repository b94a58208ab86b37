"""Turns one line of a sample file into a ``Sample``: OpenAI request, batch, ShareGPT, session or Mooncake trace form.

The form is seen from a line's keys, so files need no option that names it and may mix forms:

    {"messages": [...], ...}                                     chat
    {"prompt": "...", ...}                                       completions
    {"input": "...", ...}                                        embeddings
    {"query": "...", "documents": [...], ...}                    rerank
    {"custom_id": "...", "url": "/v1/...", "body": {...}}        OpenAI batch
    {"conversations": [{"from": "human", "value": "..."}, ...]}  ShareGPT
    {"turns": ["...", {"content": "...", "pause_s": 2}], ...}    a conversation whose answers the server gives
    {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}    Mooncake trace

Source: the OpenAI API reference; the ShareGPT dump; the trace of "Mooncake: A KVCache-centric Disaggregated
Architecture for LLM Serving" (blocks of 512 tokens, equal ids for equal text).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from headrace.bench.prompts import PromptMaker
from headrace.bench.records import Operation
from headrace.bench.sample import PATHS, Sample

MAX_TRACE_TOKENS: Final = 2_000_000
TRACE_BLOCK_TOKENS: Final = 512
_SENDER_KEYS: Final = frozenset({"model", "stream", "stream_options", "at_s"})
_HUMAN: Final = frozenset({"human", "user"})
_ASSISTANT: Final = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard", "model"})


class LineError(Exception):
    """A line is no request; the message says why."""


class LineReader:
    """Makes samples of decoded lines.

    Args:
        prompts: what traces, which have lengths but no text, are filled with.
        seed: of that text.
    """

    def __init__(self, prompts: PromptMaker, seed: int = 0) -> None:
        self._prompts = prompts
        self._seed = seed

    def sample(self, found: object, line: int) -> Sample:
        """Gives the sample of one JSON value.

        Raises:
            LineError: it is none.
        """
        if not isinstance(found, dict):
            raise LineError(f"is {_kind(found)}, not a JSON object")
        if "body" in found and ("url" in found or "custom_id" in found):
            return _batch_line(found, line)
        if "conversations" in found:
            return _share_gpt(found, line)
        if "turns" in found:
            return _session(found, line)
        if "input_length" in found:
            at_s = _number(found, "timestamp") / 1000 if "timestamp" in found else None
            tokens = _count(found, "input_length"), _count(found, "output_length")
            return self.trace_sample(*tokens, at_s=at_s, line=line, blocks=_block_ids(found))
        return _request(found, line)

    def trace_sample(
        self, input_tokens: int, output_tokens: int, *, at_s: float | None, line: int, blocks: list[int]
    ) -> Sample:
        """Gives a chat request of these lengths.

        Args:
            blocks: identities of its blocks of 512 tokens; equal leading ones make equal leading text.
        """
        random = np.random.default_rng([self._seed, line])
        whole = blocks[: input_tokens // TRACE_BLOCK_TOKENS]
        prefix = " ".join(self._prompts.block(identity, TRACE_BLOCK_TOKENS) for identity in whole)
        if len(whole) * TRACE_BLOCK_TOKENS >= input_tokens:
            content = prefix
        else:
            content = self._prompts.extend(prefix, input_tokens, random)
        body: dict[str, object] = {"messages": [_user(content)], "max_tokens": output_tokens}
        return Sample("chat", body, line, at_s)


def _request(found: Mapping[str, object], line: int, operation: Operation | None = None) -> Sample:
    at_s = _number(found, "at_s") if "at_s" in found else None
    body = {key: value for key, value in found.items() if key not in _SENDER_KEYS}
    seen = _operation_of(body)
    if seen is None:
        keys = ", ".join(list(found)[:6]) or "none"
        raise LineError(f"has none of messages, prompt, input, query, conversations, turns, input_length; keys: {keys}")
    if operation is not None and operation != seen:
        raise LineError(f"goes to {operation}, but its body is of {seen}")
    _check_body(body, seen)
    return Sample(seen, body, line, at_s)


def _operation_of(body: Mapping[str, object]) -> Operation | None:
    if "messages" in body:
        return "chat"
    if "query" in body:
        return "rerank"
    if "prompt" in body:
        return "completions"
    return "embeddings" if "input" in body else None


def _check_body(body: Mapping[str, object], operation: Operation) -> None:
    """Only what makes a line senseless; whether a server takes it is the server's to say."""
    if operation == "chat":
        messages = body["messages"]
        if not isinstance(messages, list) or not messages:
            raise LineError(f"messages is {_kind(messages)}, a list with at least one message is needed")
        for at, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise LineError(f"messages[{at}] is no object with a role")
    elif operation == "rerank":
        documents = body.get("documents", body.get("texts"))
        if not isinstance(body["query"], str):
            raise LineError(f"query is {_kind(body['query'])}, a string is needed")
        if not isinstance(documents, list) or not documents:
            raise LineError("documents (or texts) is missing or empty")
    else:
        key = "prompt" if operation == "completions" else "input"
        if not isinstance(body[key], str | list) or not body[key]:
            raise LineError(f"{key} is {_kind(body[key])}, a string or list is needed that is not empty")


def _batch_line(found: Mapping[str, object], line: int) -> Sample:
    body = found["body"]
    if not isinstance(body, dict):
        raise LineError(f"body is {_kind(body)}, not a JSON object")
    url = found.get("url", "")
    operation = next((kind for kind, path in PATHS.items() if url == path), None)
    if url and operation is None:
        raise LineError(f"url is {url!r}, known are {', '.join(PATHS.values())}")
    return _request(body, line, operation)


def _share_gpt(found: Mapping[str, object], line: int) -> Sample:
    turns = found["conversations"]
    if not isinstance(turns, list):
        raise LineError(f"conversations is {_kind(turns)}, not a list")
    system: list[dict[str, object]] = []
    users: list[str] = []
    for at, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise LineError(f"conversations[{at}] is {_kind(turn)}, not an object")
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(role, str) or not isinstance(text, str):
            raise LineError(f"conversations[{at}] lacks from or value")
        if role in _HUMAN:
            if text.strip():
                users.append(text)
        elif role == "system" and not users:
            system.append({"role": "system", "content": text})
        elif role not in _ASSISTANT and role != "system":
            raise LineError(f"conversations[{at}].from is {role!r}, known are human, gpt and system")
    if not users:
        raise LineError("no turn is of a human with words in it")
    return _conversation(system, [(text, 0.0) for text in users], {}, None, line)


def _session(found: Mapping[str, object], line: int) -> Sample:
    listed = found["turns"]
    if not isinstance(listed, list) or not listed:
        raise LineError(f"turns is {_kind(listed)}, a list with at least one turn is needed")
    turns = []
    for at, turn in enumerate(listed):
        content = turn.get("content") if isinstance(turn, dict) else turn
        if not isinstance(content, str) or not content:
            raise LineError(f"turns[{at}] is no text and no object with content")
        pause_s = _number(turn, "pause_s") if isinstance(turn, dict) and "pause_s" in turn else 0.0
        turns.append((content, pause_s))
    system = found.get("system")
    if system is not None and not isinstance(system, str):
        raise LineError(f"system is {_kind(system)}, a string is needed")
    head: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    rest = {key: value for key, value in found.items() if key not in _SENDER_KEYS | {"turns", "system"}}
    at_s = _number(found, "at_s") if "at_s" in found else None
    return _conversation(head, turns, rest, at_s, line)


def _conversation(
    system: list[dict[str, object]],
    turns: list[tuple[str, float]],
    rest: Mapping[str, object],
    at_s: float | None,
    line: int,
) -> Sample:
    messages = [*system, _user(turns[0][0])]
    pauses_s = tuple(pause_s for _, pause_s in turns[1:])
    return Sample(
        "chat",
        {**rest, "messages": messages},
        line,
        at_s,
        tuple((_user(content),) for content, _ in turns[1:]),
        pauses_s if any(pauses_s) else (),
    )


def _user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def _block_ids(found: Mapping[str, object]) -> list[int]:
    blocks = found.get("hash_ids", [])
    if not isinstance(blocks, list) or any(type(block) is not int or block < 0 for block in blocks):
        raise LineError("hash_ids is no list of whole numbers from 0")
    return blocks


def _count(found: Mapping[str, object], key: str) -> int:
    value = found.get(key)
    if type(value) is not int or not 1 <= value <= MAX_TRACE_TOKENS:
        raise LineError(f"{key} is {value!r}, a whole number from 1 to {MAX_TRACE_TOKENS} is needed")
    return value


def _number(found: Mapping[str, object], key: str) -> float:
    value = found[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise LineError(f"{key} is {value!r}, a number from 0 is needed")
    return float(value)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string" if value else "an empty string"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"
