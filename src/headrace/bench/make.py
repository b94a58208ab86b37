"""Makes sample files: as many lines as wanted, with lengths, shared beginnings and arrivals as wanted.

Lines are made in pieces, each from a seed of its own, so the file is the same however many processes make it.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np

from headrace.base.errors import ConfigError, MachineError
from headrace.bench.counting import TokenCounter
from headrace.bench.prompts import PromptMaker
from headrace.bench.records import Operation
from headrace.bench.spread import Spread

_PIECE_LINES: Final = 250
_AHEAD: Final = 4  # pieces a process may be ahead of the writer, so that memory stays flat
_DOCUMENTS: Final = 8
Tell = Callable[[int], None]
"""Called with the lines that are written."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to make.

    Args:
        prompt_tokens: of a prompt or a turn, or of each text that is embedded or ranked.
        output_tokens: asked for as ``max_tokens``.
        turns: of a conversation; more than one makes session lines.
        pause_s: before a later turn.
        shared_ratio: share of lines that begin with one of ``num_prefixes`` texts of ``prefix_tokens`` tokens; of
            those, the first is the commonest, the n-th n times rarer, as system prompts are.
        rate_per_s: writes Poisson arrivals ``at_s`` of this rate; None writes none.
        text: what prompts are cut from; None takes the text that ships.
        tokenizer: folder of the model whose tokens are counted; None counts by words.
    """

    num_lines: int
    operation: Operation
    prompt_tokens: Spread
    output_tokens: Spread
    turns: Spread = field(default_factory=lambda: Spread("constant", 1.0))
    pause_s: Spread = field(default_factory=lambda: Spread("constant", 0.0))
    shared_ratio: float = 0.0
    prefix_tokens: int = 256
    num_prefixes: int = 10
    rate_per_s: float | None = None
    text: str | None = None
    tokenizer: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_lines <= 100_000_000:
            raise ConfigError(f"{self.num_lines} lines are asked for: from 1 to 100,000,000 can be made")
        if not 0 <= self.shared_ratio <= 1:
            raise ConfigError(f"the share of lines with a common beginning is {self.shared_ratio}: 0 to 1 is needed")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < 1e6:
            raise ConfigError(f"the rate is {self.rate_per_s} requests/s: over 0 and below 1,000,000 is needed")


class LineMaker:
    """Makes the lines of a plan, piece by piece."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        tokenizer = TokenCounter(plan.tokenizer).tokenizer if plan.tokenizer is not None else None
        self._prompts = PromptMaker(plan.text, tokenizer)
        self._prefix_of = Spread("zipf", float(plan.num_prefixes), 1.0)

    def piece(self, index: int) -> bytes:
        """Gives up to 250 lines, from line ``250 × index`` on."""
        plan = self._plan
        first = index * _PIECE_LINES
        lengths = random.Random(f"{plan.seed}:{index}")  # noqa: S311 - lines that repeat themselves are the point
        places = np.random.default_rng([plan.seed, index])
        num = min(_PIECE_LINES, plan.num_lines - first)
        return b"".join(msgspec.json.encode(self._line(lengths, places)) + b"\n" for _ in range(num))

    def _line(self, lengths: random.Random, places: np.random.Generator) -> dict[str, object]:
        plan = self._plan
        match plan.operation:
            case "embeddings":
                return {"input": self._text(lengths, places)}
            case "rerank":
                documents = [self._text(lengths, places, is_shared=False) for _ in range(_DOCUMENTS)]
                return {"query": self._text(lengths, places), "documents": documents}
            case "completions" | "chat":
                max_tokens = max(1, round(plan.output_tokens.draw(lengths)))
                first = self._text(lengths, places)
                if plan.operation == "completions":
                    return {"prompt": first, "max_tokens": max_tokens}
                num_turns = max(1, round(plan.turns.draw(lengths)))
                if num_turns == 1:
                    return {"messages": [{"role": "user", "content": first}], "max_tokens": max_tokens}
                later = [
                    {
                        "content": self._text(lengths, places, is_shared=False),
                        "pause_s": round(plan.pause_s.draw(lengths), 3),
                    }
                    for _ in range(num_turns - 1)
                ]
                return {"turns": [first, *later], "max_tokens": max_tokens}

    def _text(self, lengths: random.Random, places: np.random.Generator, *, is_shared: bool = True) -> str:
        plan = self._plan
        num_tokens = max(1, round(plan.prompt_tokens.draw(lengths)))
        if is_shared and lengths.random() < plan.shared_ratio:
            which = int(self._prefix_of.draw(lengths))
            prefix = self._prompts.block((plan.seed << 16) + which, min(plan.prefix_tokens, num_tokens))
            return self._prompts.extend(prefix, num_tokens, places)
        return self._prompts.prompt(num_tokens, places)


def make_file(plan: Plan, path: Path, *, processes: int, tell: Tell = lambda done: None) -> None:
    """Writes the lines of a plan to ``path``, which is replaced only when all are there.

    Args:
        processes: that make lines; 1 makes them here.

    Raises:
        ConfigError, ModelError: text or tokenizer cannot be used.
        MachineError: the file cannot be written.
    """
    maker = LineMaker(plan)  # its faults come here, not out of another process
    num_pieces = -(-plan.num_lines // _PIECE_LINES)
    scratch = path.with_name(f"{path.name}.part")
    try:
        with scratch.open("wb") as file:
            if processes == 1 or num_pieces == 1:
                _write(plan, map(maker.piece, range(num_pieces)), file, tell)
            else:
                _write(plan, _pieces(plan, num_pieces, processes), file, tell)
        scratch.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _write(plan: Plan, pieces: Iterator[bytes], file: BinaryIO, tell: Tell) -> None:
    arrivals = random.Random(f"{plan.seed}:arrivals")  # noqa: S311
    at_s, done = 0.0, 0
    told_s = time.monotonic()
    for piece in pieces:
        if plan.rate_per_s is None:
            file.write(piece)
        else:
            for line in piece.splitlines(keepends=True):
                file.write(b'{"at_s":%.4f,' % at_s + line[1:])
                at_s += arrivals.expovariate(plan.rate_per_s)
        done = min(done + _PIECE_LINES, plan.num_lines)
        if time.monotonic() - told_s > 0.2 or done == plan.num_lines:
            told_s = time.monotonic()
            tell(done)


_maker: LineMaker | None = None  # of a making process


def _start(plan: Plan) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    global _maker
    _maker = LineMaker(plan)


def _make(index: int) -> bytes:
    assert _maker is not None
    return _maker.piece(index)


def _pieces(plan: Plan, num_pieces: int, processes: int) -> Iterator[bytes]:
    with ProcessPoolExecutor(processes, get_context("spawn"), _start, (plan,)) as pool:
        waiting: deque[Future[bytes]] = deque()
        asked = 0
        try:
            while asked < num_pieces or waiting:
                while asked < num_pieces and len(waiting) < _AHEAD * processes:
                    waiting.append(pool.submit(_make, asked))
                    asked += 1
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
