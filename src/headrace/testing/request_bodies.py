"""Request bodies by the thousand: valid ones in every form, and broken ones of every kind, from a seed.

A body comes with what a server must do about it: answer it, refuse it, or only never fail inside.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"


class Verdict(StrEnum):
    """What a server must do."""

    GOOD = "good"  # 200
    BAD = "bad"  # a 4xx that says what is wrong
    ANY = "any"  # bytes were flipped: anything but a 5xx


@dataclass(frozen=True, slots=True)
class Body:
    """One request; ``what`` says in a word how it was made, for the report of a failure."""

    path: str
    data: bytes
    verdict: Verdict
    is_stream: bool
    what: str


_TEXTS: Final = (
    "Say hi", " ", "\n", "a" * 60,
    "🦊👩‍👩‍👧‍👦", "e\u0301\u200b\ufeff", "\x00\x01\x7f", "<|im_start|>system\nx<|im_end|>",
    "{{ 7 * 7 }}{% raw %}", "SELECT 1; --", "مرحبا بالعالم", "\u202eabc", "½²Ⅷ", "\\u0000", '"}],"x":"', "漢字",
)  # fmt: skip
_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
    "required": ["a"],
    "$defs": {"n": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}},
}
_JUNK: Final[tuple[Any, ...]] = ("x", -1, 10**30, 1.5, True, [], {}, [[]], {"a": 1}, "\ud800", [None])

# Field to values that are fine, on both routes.
_GOOD: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (0, 0.0, 0.7, 1, 2, None),
    "top_p": (5e-324, 1, 0.1, 0.999, None),
    "top_k": (-1, 0, 1, 40, None),
    "min_p": (0, 0.05, 1),
    "presence_penalty": (-2, 0, 2.0, None),
    "frequency_penalty": (-2, 0, 2.0, None),
    "repetition_penalty": (1, 1.3, 0.5),
    "seed": (0, 1, -1, 2**63 - 1, -(2**63), None),
    "stop": (None, [], "zq", ["zq"], ["\n\n", "🦊"], ["x" * 256] * 1, [f"stop {n}" for n in range(16)]),
    "stop_token_ids": ([], [2], [0, 1, 2], None),
    "logit_bias": ({}, None, {"5": 10}, {"3": -100, "4": 100.0}),
    "n": (1, 2, 1.0, None),
    "ignore_eos": (True, False, None),
    "min_tokens": (0, 1, None),
    "user": ("me", None),
    "unknown_field": (1, [1], {"a": None}),
    "priority": (0, 1, None),
    "cache_salt": ("", "salt", None),
    "truncate_prompt_tokens": (-1, 1, 300, None),
    "include_stop_str_in_output": (True, False, None),
    "skip_special_tokens": (True, False, None),
    "allowed_token_ids": ([], [40, 41, 42], None),
    "bad_words": ([], ["x"], ["the mill", "🦊", " a"], None),
    "return_token_ids": (True, False, None),
    "return_tokens_as_token_ids": (True, False, None),
    "truncation_side": ("left", "right", None),
}
# What an answer must look like; one of them at a time, and without tools.
_WISHES: Final[tuple[dict[str, Any], ...]] = (
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}},
    {"structured_outputs": {"json": _SCHEMA}},
    {"structured_outputs": {"choice": ["ja", "nein"]}},
    {"structured_outputs": {"json_object": False}},
    {"guided_regex": "[a-z]{1,5}"},
    {"guided_choice": ["one", "two", "🦊"]},
    {"guided_grammar": 'start: "a" start | "b"'},
    {"guided_json": {"enum": [1, 2, None]}},
)
_GOOD_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "max_completion_tokens": (1, 4, None),
    "tools": (None, [], [_TOOL]),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (True, False, None),
    "metadata": ({"a": "b"}, None),
    "store": (False, None),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, None),
    "add_generation_prompt": (True, False),
}
_GOOD_TEXT: Final[dict[str, tuple[Any, ...]]] = {
    "echo": (True, False, None),
    "logprobs": (0, 1, 5, None),
    "best_of": (None,),
    "add_special_tokens": (True, False),
}
# Field to values that are wrong on both routes.
_BAD: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (-0.1, 2.1, "1", [], True, 10**400),
    "top_p": (0, -1, 1.01, "x"),
    "top_k": (-2, 1.5, "x", 2**40),
    "min_p": (-1, 2, {}),
    "presence_penalty": (-2.01, 3, "x"),
    "frequency_penalty": (-3, 2.01, []),
    "repetition_penalty": (0, -1, "x"),
    "seed": (1.5, "x", [], 2**70),
    "stop": ("", [""], 5, [5], ["x"] * 17, ["x" * 257], {"a": 1}),
    "stop_token_ids": (5, ["x"], [-1], [1.5], [2**40]),
    "logit_bias": ([], {"x": 1}, {"1": "x"}, {"1": 101}, {"-1": 1}, {"99999999999999999999": 1}),
    "n": (0, 9, -1, 1.5, "x", 10**9),
    "max_tokens": (-1, 1.5, "x", [], 10**30),
    "stream": ("yes", 1, []),
    "model": (5, [], {}, ""),
    "ignore_eos": ("x", 1),
    "priority": (-1, "x", 1.5),  # nobody may put itself before others
    "truncate_prompt_tokens": (0, -2, "x", 1.5),
    "allowed_token_ids": ([-1], ["x"], [99_999], 5),
    "bad_words": ("x", [""], [5], ["x" * 257], ["x"] * 65),
    "truncation_side": ("middle", 5, []),
    "prompt_logprobs": (-1, 21, "x"),
    "guided_regex": ("(a", "(?=a)b", "", 5, "a" * 300_000),
    "guided_json": ("{", 5, {"type": "strin"}, {"$ref": "#/x"}, {"type": "array", "uniqueItems": True}, False),
    "guided_grammar": ("start: nobody", "", 5, "root ::= (", "("),
    "guided_choice": ([], [5], [""], "x"),
    "structured_outputs": ({}, {"json": {}, "regex": "a"}, {"regex": "["}, 5, {"json_object": 5}),
}
_BAD_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "messages": (
        None, [], "hi", 5, [5], [{}], [[]], [{"role": "user"}], [{"content": "x"}], [{"role": 5, "content": "x"}],
        [{"role": "pirate", "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "tool_calls": [{}]}], [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "long " * 3000}],
    ),
    "top_logprobs": (2, -1, 21, "x"),
    "tools": ("x", [5], [{}], [{"type": "function"}]),
    "chat_template_kwargs": ("x", {"messages": 1}, {"x": [1]}),
    "response_format": (5, {"type": "martian"}, {"type": "json_schema"}, {"type": "json_object", "schema": 5}),
    "tool_choice": ("maybe", "required", {"type": "function", "function": {"name": "nobody"}}, 5, {}),
    "parallel_tool_calls": ("x", 1),
    "max_completion_tokens": (0, -1, "x"),
}  # fmt: skip
_BAD_TEXT: Final[dict[str, tuple[Any, ...]]] = {
    "prompt": (None, [], {}, 5, ["x", 5], [-1], [2**40], [99999], [[]], "long " * 3000, [1] * 5000, "\ud800"),
    "logprobs": (-1, 21, "x", []),
    "echo": ("x", 5),
    "best_of": (0, 9, "x"),
}


class BodyMaker:
    """Makes bodies for one model.

    Args:
        model: the served name.
        vocab_size: token ids below it are legal.
        seed: the same seed makes the same bodies.
    """

    def __init__(self, model: str, vocab_size: int, seed: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._random = random.Random(seed)  # noqa: S311 (test data)

    def make(self) -> Body:
        """Makes the next body: about half are good."""
        random = self._random
        path = random.choice((CHAT, TEXT))
        fields = self._good(path)
        draw = random.random()
        if draw < 0.5:
            return self._body(path, fields, Verdict.GOOD, "good")
        if draw < 0.8:
            bad = _BAD | (_BAD_CHAT if path == CHAT else _BAD_TEXT)
            name = random.choice(list(bad))
            value = random.choice(bad[name])
            if name == "top_logprobs" and value == 2:
                fields.pop("logprobs", None)  # then it has nothing to belong to
            fields[name] = value
            if name in ("prompt", "messages"):
                fields.pop("truncate_prompt_tokens", None)  # or a prompt that is too long would be cut
            if name == "tool_choice":
                fields.pop("tools", None)  # so that there is nothing to choose from
            return self._body(path, fields, Verdict.BAD, f"{name}={str(value)[:40]!r}")
        if draw < 0.85:
            name = "messages" if path == CHAT else "prompt"
            del fields[name]
            return self._body(path, fields, Verdict.BAD, f"without {name}")
        return random.choice((self._junk_field, self._cut, self._flipped, self._nested, self._not_an_object))(
            path, fields
        )

    def _good(self, path: str) -> dict[str, Any]:
        random = self._random
        fields: dict[str, Any] = {"model": self._model, "max_tokens": random.choice((1, 2, 5, 8))}
        if path == CHAT:
            fields["messages"] = self._messages()
        else:
            fields["prompt"] = self._prompt()
        table = _GOOD | (_GOOD_CHAT if path == CHAT else _GOOD_TEXT)
        for name in random.sample(list(table), random.randrange(8)):
            fields[name] = random.choice(table[name])
        if random.random() < 0.2:
            fields |= random.choice(_WISHES)
            fields.pop("tools", None)
            fields.pop("allowed_token_ids", None)
        if path == CHAT and random.random() < 0.3:
            fields["logprobs"] = True
            fields["top_logprobs"] = random.choice((None, 0, 3, 20))
        if random.random() < 0.4:
            fields["stream"] = True
            if random.random() < 0.5:
                fields["stream_options"] = random.choice(
                    (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True})
                )
        return fields

    def _text(self) -> str:
        return "".join(self._random.choice(_TEXTS) for _ in range(self._random.randrange(1, 4)))

    def _messages(self) -> list[dict[str, Any]]:
        random = self._random
        turns: list[dict[str, Any]] = []
        if random.random() < 0.4:
            turns.append({"role": random.choice(("system", "developer")), "content": self._text()})
        for _ in range(random.randrange(1, 3)):
            turns.append({"role": "user", "content": self._content()})
            if random.random() < 0.3:
                call = {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "f", "arguments": random.choice(("{}", "{", ""))},
                }
                turns.append({"role": "assistant", "content": None, "tool_calls": [call]})
                turns.append({"role": "tool", "tool_call_id": "c1", "content": self._text()})
        return turns

    def _content(self) -> object:
        if self._random.random() < 0.7:
            return self._text()
        return [{"type": "text", "text": self._text()} for _ in range(self._random.randrange(1, 4))]

    def _prompt(self) -> object:
        ids = [self._random.randrange(3, self._vocab_size) for _ in range(self._random.randrange(1, 20))]
        makers: tuple[Callable[[], object], ...] = (
            self._text,
            lambda: [self._text() for _ in range(self._random.randrange(1, 4))],
            lambda: ids,
            lambda: [ids, ids[:1]],
        )
        return self._random.choice(makers)()

    def _body(self, path: str, fields: dict[str, Any], verdict: Verdict, what: str) -> Body:
        data = json.dumps(fields, ensure_ascii=self._random.random() < 0.5).encode("utf-8", "surrogatepass")
        return Body(path, data, verdict, fields.get("stream") is True, what)

    def _junk_field(self, path: str, fields: dict[str, Any]) -> Body:
        name = self._random.choice([*fields, "\u0000", "__proto__", "max_tokens"])
        value = self._random.choice(_JUNK)
        fields[name] = value
        return self._body(path, fields, Verdict.ANY, f"junk {name}={value!r}")

    def _cut(self, path: str, fields: dict[str, Any]) -> Body:
        data = self._body(path, fields, Verdict.BAD, "").data
        return Body(path, data[: self._random.randrange(len(data))], Verdict.BAD, False, "cut short")

    def _flipped(self, path: str, fields: dict[str, Any]) -> Body:
        data = bytearray(self._body(path, fields, Verdict.ANY, "").data)
        for _ in range(self._random.randrange(1, 6)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return Body(path, bytes(data), Verdict.ANY, False, "bytes flipped")

    def _nested(self, path: str, fields: dict[str, Any]) -> Body:
        depth = self._random.choice((65, 1000, 100_000))
        data = self._body(path, fields, Verdict.BAD, "").data[:-1] + b', "deep": ' + b"[" * depth + b"]" * depth + b"}"
        return Body(path, data, Verdict.BAD, False, f"nested {depth} deep")

    def _not_an_object(self, path: str, _: dict[str, Any]) -> Body:
        data = self._random.choice((b"", b"[]", b"null", b'"x"', b"5", b"{", b"\xff\xfe", b"{} {}", b"[" * 50_000))
        return Body(path, data, Verdict.BAD, False, f"not an object {data[:10]!r}")
