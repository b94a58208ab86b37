"""The process that tries grammars before anyone else compiles them: ``python -m headrace.text.grammar_child``.

Sources come from clients. A compiler written for good ones may recurse until its stack ends, or work for minutes; here
that costs a process that nobody misses. A message on standard input's socket is a 4-byte big-endian length and a
``Grammar`` as msgpack; the answer is a length and a ``Verdict``. The CPU time of one grammar is limited by the kernel;
memory by an address space that is set once. End of input ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from headrace.base.errors import RequestError
from headrace.protocol.frames import Grammar, GrammarKind
from headrace.text.grammar import GrammarState, GrammarVocabulary, grammar_error
from headrace.text.grammar_verdict import HEADER, Verdict
from headrace.text.schema import find_loop

_EOS: Final = 256


def byte_vocabulary() -> GrammarVocabulary:
    """Gives a vocabulary of single bytes: what a grammar costs to compile hardly depends on the vocabulary."""
    words = [bytes([byte]) for byte in range(256)]
    return GrammarVocabulary([*words, b"<eos>"], [_EOS], [_EOS], _EOS + 1, lambda text: list(text.encode()))


def judge(grammar: Grammar, vocabulary: GrammarVocabulary) -> Verdict:
    """Compiles a grammar and asks it for its first tokens; a GBNF grammar is rewritten as Lark first."""
    try:
        if grammar.kind is GrammarKind.LARK and "::=" in grammar.source:
            grammar = Grammar(GrammarKind.LARK, _from_gbnf(grammar.source))
        loop = find_loop(json.loads(grammar.source)) if grammar.kind is GrammarKind.JSON else None
        if loop is not None:
            raise grammar_error(
                f"the $ref {loop!r} leads back to itself before any value ends: no finite value fits it"
            )
        state = GrammarState.build(grammar, vocabulary)
        state.fill(np.zeros(vocabulary.words_per_mask, np.uint32))
        if state.failure is not None:
            raise grammar_error(state.failure)
    except RequestError as error:
        return Verdict(error=error.message)
    return Verdict(grammar=grammar)


def _from_gbnf(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as fault:
        raise grammar_error(f"not a GBNF grammar: {fault}") from fault


def main(arguments: list[str]) -> int:
    """Serves until the input ends: ``CPU_S MEMORY_BYTES``."""
    cpu_s, memory_bytes = float(arguments[0]), int(arguments[1])
    vocabulary = byte_vocabulary()
    judge(
        Grammar(GrammarKind.JSON, '{"type": "object"}'), vocabulary
    )  # what is loaded lazily is not on the first's bill
    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = socket.socket(fileno=0)
    decoder = msgspec.msgpack.Decoder(Grammar)
    while True:
        head = _take(link, HEADER.size)
        if head is None:
            return 0
        body = _take(link, HEADER.unpack(head)[0])
        if body is None:
            return 0
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)  # the signal's default action ends the process
        answer = msgspec.msgpack.encode(judge(decoder.decode(body), vocabulary))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        link.sendall(HEADER.pack(len(answer)) + answer)


def _take(link: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = link.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
