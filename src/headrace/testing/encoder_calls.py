"""Calls to a model that makes vectors, good and wrong ones of every kind, from a seed, with what must come back."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

EMBEDDINGS: Final = "/v1/embeddings"
BATCH_ITEMS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call.

    Args:
        what: how it was made, for the report of a failure.
        body: JSON as it goes out.
        status: what the server must answer.
        words: what the message of a refusal must hold.
        num_items: results that a good answer must have.
    """

    what: str
    path: str
    body: bytes
    status: int
    words: tuple[str, ...] = ()
    num_items: int = 0

    def fault(self, status: int, answer: bytes) -> str | None:
        """Says what is wrong with an answer; None where it is as it must be."""
        if status != self.status:
            return f"{status} instead of {self.status}"
        value = json.loads(answer)
        if status == 200:
            found = value if isinstance(value, list) else value.get("data", value.get("results"))
            return None if len(found) == self.num_items else f"{len(found)} results instead of {self.num_items}"
        message = value["error"]["message"]
        missing = [word for word in self.words if word not in message]
        return f"the message {message!r} lacks {missing}" if missing else None


@dataclass(frozen=True, slots=True)
class Target:
    """What is called.

    Args:
        words: words of the vocabulary, each of one token.
        word_id: the id of one of them.
        num_special: tokens that the tokenizer adds to a text.
    """

    model: str
    words: tuple[str, ...]
    word_id: int
    context_tokens: int
    vocab_size: int
    width: int
    num_special: int = 2


class CallMaker:
    """Makes calls. The same seed makes the same ones."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self._random = random.Random(seed)  # noqa: S311  # no secret
        self._good: tuple[Callable[[], Call], ...] = (
            self._single, self._list, self._ids, self._shortened, self._longest, self._cut, self._blank,
            self._rerank, self._tei_rerank, self._score, self._embed,
        )  # fmt: skip
        self._wrong = self._wrong_calls()

    def make(self) -> Call:
        """Gives the next one; a fifth of them is wrong."""
        if self._random.random() < 0.2:
            return self._random.choice(self._wrong)
        return self._random.choice(self._good)()

    def batch(self, num_items: int = BATCH_ITEMS) -> Call:
        """Gives a batch of short texts."""
        texts = [self._text(self._random.randint(1, 24)) for _ in range(num_items)]
        return self._call(f"{num_items} texts", EMBEDDINGS, num_items, input=texts, encoding_format="base64")

    def longest_batch(self, num_items: int) -> Call:
        """Gives a batch of texts of the longest length, as token ids."""
        ids = [self._target.word_id] * self._target.context_tokens
        return self._call(f"{num_items} longest texts", EMBEDDINGS, num_items, input=[ids] * num_items)

    def too_large_batch(self) -> Call:
        """Gives a batch of more token ids than a body may hold values."""
        body = {"model": self._target.model, "input": [[1] * 32] * 20_000}
        return Call("too large a batch", EMBEDDINGS, json.dumps(body).encode(), 400, ("too many values", "500000"))

    def _call(self, what: str, path: str, num_items: int, **fields: Any) -> Call:
        body = fields if "inputs" in fields else {"model": self._target.model, **fields}
        return Call(what, path, json.dumps(body).encode(), 200, num_items=num_items)

    def _text(self, num_words: int) -> str:
        return " ".join(self._random.choice(self._target.words) for _ in range(num_words))

    def _texts(self, most: int = 16) -> list[str]:
        return [self._text(self._random.randint(1, 40)) for _ in range(self._random.randint(1, most))]

    def _single(self) -> Call:
        form = self._random.choice(({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"user": "me"}))
        return self._call("a text", EMBEDDINGS, 1, input=self._text(self._random.randint(1, 40)), **form)

    def _list(self) -> Call:
        texts = self._texts()
        return self._call("a list", EMBEDDINGS, len(texts), input=texts)

    def _ids(self) -> Call:
        ids = [self._random.randrange(self._target.vocab_size) for _ in range(self._random.randint(1, 40))]
        return self._call("ids", EMBEDDINGS, 1, input=self._random.choice((ids, [ids])))

    def _shortened(self) -> Call:
        size = self._random.randint(1, self._target.width)
        return self._call("dimensions", EMBEDDINGS, 1, input=self._text(5), dimensions=size)

    def _longest(self) -> Call:
        text = self._text(self._target.context_tokens - self._target.num_special)
        return self._call("a longest text", EMBEDDINGS, 1, input=text)

    def _cut(self) -> Call:
        text = self._text(self._target.context_tokens * self._random.randint(2, 20))
        tokens = self._random.choice((-1, 1, self._target.context_tokens))
        return self._call("a text that is cut", EMBEDDINGS, 1, input=text, truncate_prompt_tokens=tokens)

    def _blank(self) -> Call:
        return self._call("a blank text", EMBEDDINGS, 1, input=self._random.choice((" ", "\n\t", "\u00a0" * 9)))

    def _rerank(self) -> Call:
        texts = self._texts()
        path = self._random.choice(("/rerank", "/v1/rerank", "/v2/rerank"))
        top = self._random.randint(1, len(texts))
        return self._call("rerank", path, top, query=self._text(4), documents=texts, top_n=top)

    def _tei_rerank(self) -> Call:
        texts = self._texts()
        return self._call("TEI's rerank", "/rerank", len(texts), query=self._text(4), texts=texts)

    def _score(self) -> Call:
        texts = self._texts()
        return self._call("score", "/v1/score", len(texts), text_1=self._text(4), text_2=texts)

    def _embed(self) -> Call:
        texts = self._texts()
        return self._call("TEI's embed", "/embed", len(texts), inputs=texts)

    def _wrong_calls(self) -> Sequence[Call]:
        target = self._target
        limit = f"maximum context length is {target.context_tokens}"
        word = target.words[0]
        found = [
            Call("broken JSON", EMBEDDINGS, b'{"input": "a"', 400),
            Call("no object", EMBEDDINGS, b"[]", 400),
            Call(
                "another model", EMBEDDINGS, json.dumps({"model": "nobody", "input": word}).encode(), 404, ("nobody",)
            ),
        ]
        for what, path, fields, words in (
            ("no input", EMBEDDINGS, {}, ("input",)),
            ("null", EMBEDDINGS, {"input": None}, ("input",)),
            ("an empty text", EMBEDDINGS, {"input": ""}, ("empty",)),
            ("an empty list", EMBEDDINGS, {"input": []}, ("not empty",)),
            ("an empty text in a list", EMBEDDINGS, {"input": [word, ""]}, ("input[1]",)),
            ("no ids", EMBEDDINGS, {"input": [[]]}, ("no tokens",)),
            ("a number", EMBEDDINGS, {"input": 7}, ("input",)),
            ("an object", EMBEDDINGS, {"input": {"text": word}}, ("input",)),
            ("texts and truths", EMBEDDINGS, {"input": [word, True]}, ("input[1]",)),
            ("ids with a fraction", EMBEDDINGS, {"input": [[1, 2.5]]}, ("input[0]",)),
            ("a negative id", EMBEDDINGS, {"input": [[-1]]}, ("input[0]",)),
            ("an id too large", EMBEDDINGS, {"input": [[target.vocab_size]]}, ("vocabulary",)),
            ("ids too many", EMBEDDINGS, {"input": [[1] * (target.context_tokens + 1)]}, (limit,)),
            ("too long", EMBEDDINGS, {"input": f"{word} " * (target.context_tokens + 9)}, (limit,)),
            ("far too long", EMBEDDINGS, {"input": f"{word} " * 20_000}, (limit,)),
            ("dimensions 0", EMBEDDINGS, {"input": word, "dimensions": 0}, ("dimensions",)),
            ("dimensions", EMBEDDINGS, {"input": word, "dimensions": target.width + 1}, ("dimensions",)),
            ("a form", EMBEDDINGS, {"input": word, "encoding_format": "int8"}, ("encoding_format",)),
            ("no documents", "/v1/rerank", {"query": word, "documents": []}, ("documents",)),
            ("no query", "/v1/rerank", {"documents": [word]}, ("query",)),
            ("a document", "/v1/rerank", {"query": word, "documents": [word, 3]}, ("documents[1]",)),
            ("two names", "/rerank", {"query": word, "documents": [word], "texts": [word]}, ("two names",)),
            ("top_n", "/rerank", {"query": word, "documents": [word], "top_n": 0}, ("top_n",)),
            ("unequal", "/v1/score", {"text_1": [word] * 2, "text_2": [word] * 3}, ("2 texts",)),
            ("no classes", "/v1/classify", {"input": word}, ("classifies nothing",)),
        ):  # fmt: skip
            body = {"model": target.model, **fields}
            found.append(Call(f"wrong: {what}", path, json.dumps(body).encode(), 400, words))
        return found
