"""Grammars that an answer must follow, as token masks: one place where llguidance is spoken to.

A ``Grammar`` (``protocol.frames``) is source text of one kind; ``compile_source`` gives llguidance's own form.
``GrammarVocabulary`` is a model's vocabulary as masks need it, ``GrammarState`` one answer's position in its grammar.
Limits are part of the meaning: front and worker compile with the same, so that what one has passed the other takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.base.errors import RequestError
from headrace.protocol.frames import Grammar, GrammarKind
from headrace.text.schema import prepare

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

# llguidance's word for a mask without a token.
_NO_TEXT = "NoExtensionBias"

# llguidance is imported where it is first used: most servers see no grammar, and front and worker start without it.


@cache
def _limits() -> LLParserLimits:
    """Gives what a grammar may cost.

    A step's mask stays under ~20 ms with these, measured on ambiguous grammars and exploding patterns; the library's
    own defaults allow 0.8 s. Objects of 500 optional properties need rows of 2,000 items.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
    )


def compile_source(grammar: Grammar) -> str:
    """Gives llguidance's form of a grammar; says nothing about whether it is a good one.

    Raises:
        ValueError: the source is no JSON where it must be.
    """
    from llguidance import LLMatcher

    match grammar.kind:
        case GrammarKind.JSON:
            return LLMatcher.grammar_from_json_schema(json.dumps(prepare(json.loads(grammar.source))))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.source)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.source)


class _Words:
    """What llguidance wants to know of a vocabulary, under the names that it looks for."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id
        self._encode = encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class GrammarVocabulary:
    """A model's vocabulary, ready for masks.

    Args:
        tokens: the bytes of every id; empty for ids that stand for nothing.
        special_ids: ids that no text may match.
        eos_ids: ids that end an answer, at least one; a grammar allows them where it may end.
        vocab_size: ids of the model, ≥ ``len(tokens)``.
        encode: the tokenizer: text that the grammar forces is cut as the model knows it.

    Cost: about 0.3 s and 20 MB for 50,000 ids.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        vocab_size: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        assert eos_ids, "a grammar that cannot end is of no use"
        assert len(tokens) <= vocab_size
        words = _Words(tokens, special_ids, eos_ids[0], encode)
        self.eos_ids = frozenset(eos_ids)
        self.words_per_mask = -(-vocab_size // 32)
        self.inner = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=list(eos_ids))


class GrammarState:
    """Where one answer stands in its grammar.

    ``failure`` is None, or why no further token can be judged: the grammar costs too much at this point.
    """

    __slots__ = ("_eos_ids", "_matcher", "failure")

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self.failure: str | None = None

    @classmethod
    def build(cls, grammar: Grammar, vocabulary: GrammarVocabulary) -> GrammarState:
        """Compiles a grammar. Cost: a millisecond as a rule, a second at the worst; lets other threads run.

        Raises:
            RequestError: ``invalid_grammar``, in llguidance's words.
        """
        from llguidance import LLMatcher

        try:
            source = compile_source(grammar)
        except (ValueError, RecursionError) as fault:
            raise grammar_error(str(fault)) from fault
        matcher = LLMatcher(vocabulary.inner, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise grammar_error(matcher.get_error())
        return cls(matcher, vocabulary.eos_ids)

    def copy(self) -> GrammarState:
        """Gives another answer's state at the same place. Cost: microseconds; what is compiled is shared."""
        return GrammarState(self._matcher.deep_copy(), self._eos_ids)

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Writes which tokens may come next; every token where ``failure`` gets set.

        Args:
            mask: [words] u32, bit t of word t/32 is token t; contiguous.

        Cost: 20 to 200 µs as a rule, at most about 20 ms.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self._fail()
        elif not mask.any():
            self.failure = "no token of this model continues the answer as the grammar asks"
        if self.failure is not None:
            mask[:] = np.uint32(0xFFFFFFFF)

    def accept(self, token: int) -> bool:
        """Takes the chosen token. Gives whether the answer is complete with it (an end of sequence is)."""
        if not self._matcher.consume_token(token):
            self._fail()
            return False
        return self._matcher.is_stopped()

    def is_end(self, token: int) -> bool:
        """Whether the token is one of the model's ends of sequence."""
        return token in self._eos_ids

    def _fail(self) -> None:
        self.failure = _first_line(self._matcher.get_error())


def grammar_error(message: str, param: str | None = None) -> RequestError:
    """Makes the error for a grammar that cannot be used."""
    return RequestError(
        f"the grammar or schema cannot be used: {_first_line(message)}", param=param, code="invalid_grammar"
    )


def _first_line(message: str) -> str:
    """Gives what a client needs of llguidance's message: its dump of the parser's state is for its authors."""
    text = message.partition("<state>")[0].strip()
    if text.startswith(_NO_TEXT):
        return "no text can match it: a rule or a reference in it leads to nothing but itself"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines[1:] if line.startswith("error:")]
    return "; ".join([*lines[:1], *errors[:1]])[:400]
