"""What grammar a request's answer must follow: its own wish, or the calls that it demands, tried and found usable."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

from headrace.base.errors import RequestError
from headrace.protocol.frames import Grammar, GrammarKind
from headrace.protocol.openai import ChatRequest, CompletionRequest
from headrace.protocol.structured import Wish
from headrace.text.grammar_check import GrammarCheck
from headrace.text.message import Dialect
from headrace.text.tool_format import calls_lark

# One grammar is tried at a time; the others wait in these threads and not in those that render prompts.
_THREADS = 8


class GrammarGate:
    """Tries grammars beside the event loop."""

    def __init__(self, check: GrammarCheck | None = None) -> None:
        self._check = check or GrammarCheck()
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def grammar_of(self, request: ChatRequest | CompletionRequest, dialect: Dialect) -> Grammar | None:
        """Gives the grammar that a request's answer must follow, None for any answer.

        Raises:
            RequestError: ``invalid_grammar`` or ``grammar_too_expensive``; naming the field.
        """
        wish = wished(request, dialect)
        if wish is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, self._check.check, wish.grammar, wish.param
        )

    def close(self) -> None:
        """Ends the process that tries grammars."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._check.close()


def wished(request: ChatRequest | CompletionRequest, dialect: Dialect) -> Wish | None:
    """Gives what a request demands of its answer: a forced call comes before every other wish."""
    wish = request.options.wish
    use = request.tools if isinstance(request, ChatRequest) else None
    if use is None:
        return wish
    if use.is_forced:
        return Wish(Grammar(GrammarKind.LARK, calls_lark(dialect.form, use)), "tools")
    if wish is None:
        return None
    if wish.grammar.kind is not GrammarKind.JSON:
        raise RequestError(
            f'{wish.param} cannot be combined with tools: use a JSON Schema, or tool_choice "none"', param=wish.param
        )
    # One call, for the reason that a forced answer is one: nothing but calls could follow.
    single = dataclasses.replace(use, is_parallel=False)
    lark = calls_lark(dialect.form, single, json.loads(wish.grammar.source))
    return Wish(Grammar(GrammarKind.LARK, lark), wish.param)
