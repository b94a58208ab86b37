"""What commands send that put load on a server: a file's requests, or made-up ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.bench.sample import Sample
    from headrace.bench.workload import FileWorkload, MadeUpWorkload

_MAX_BAD_TOLD = 10


class OperationName(StrEnum):
    """What made-up requests ask for."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"


class OnBadName(StrEnum):
    """What a line does that is no request."""

    SKIP = "skip"
    STOP = "stop"


def make_workload(
    test_file: Path | None,
    *,
    operation: OperationName,
    prompt_tokens: str,
    output_tokens: str,
    prefix_tokens: int,
    must_fill: bool,
    tokenizer: Path | None,
    on_bad: OnBadName,
    seed: int,
    is_repeated: bool,
) -> FileWorkload | MadeUpWorkload:
    """Gives what is to be sent; bad lines of a file are told on stderr, the first of them by number and reason."""
    from headrace.bench.prompts import PromptMaker
    from headrace.bench.sources import OnBad
    from headrace.bench.spread import parse_spread
    from headrace.bench.workload import FileWorkload, MadeUpWorkload

    counter = None
    if tokenizer is not None:
        from headrace.bench.counting import TokenCounter  # loads a library that few runs need

        counter = TokenCounter(tokenizer).tokenizer
    prompts = PromptMaker(None, counter)
    if test_file is not None:
        return FileWorkload(
            test_file,
            is_repeated=is_repeated,
            on_bad=OnBad(on_bad.value),
            prompts=prompts,
            seed=seed,
            tell_bad=_BadLines(test_file),
        )
    return MadeUpWorkload(
        operation.value,
        parse_spread(prompt_tokens, "--prompt-tokens"),
        parse_spread(output_tokens, "--output-tokens"),
        prompts,
        prefix_tokens=prefix_tokens,
        must_fill=must_fill,
        seed=seed,
    )


class _BadLines:
    """Tells the first bad lines one by one, and then that there are more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num = 0

    def __call__(self, line: int, reason: str) -> None:
        self._num += 1
        if self._num <= _MAX_BAD_TOLD:
            sys.stderr.write(f"{self._path}, line {line}: {reason}; left out\n")
        elif self._num == _MAX_BAD_TOLD + 1:
            sys.stderr.write(f"{self._path}: more such lines; they are left out, too\n")


def made_samples(
    test_file: Path | None,
    operation: OperationName,
    prompt_tokens: str,
    output_tokens: str,
    *,
    must_fill: bool,
    tokenizer: Path | None,
    seed: int,
) -> Iterator[Sample]:
    """Gives samples without end: the file's over and over, or made-up ones."""
    return make_workload(
        test_file,
        operation=operation,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_tokens=0,
        must_fill=must_fill,
        tokenizer=tokenizer,
        on_bad=OnBadName.SKIP,
        seed=seed,
        is_repeated=True,
    ).open()
