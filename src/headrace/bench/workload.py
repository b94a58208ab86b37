"""What a run sends: a file's samples, once or over and over, or prompts that are made up as they are needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from headrace.base.errors import ConfigError
from headrace.bench.prompts import PromptMaker
from headrace.bench.records import Operation
from headrace.bench.sample import Sample
from headrace.bench.sources import OnBad, open_samples
from headrace.bench.spread import Spread

_DOCUMENTS: Final = 8  # of a made-up rerank
TellBad = Callable[[int, str], None]


@dataclass(slots=True)
class FileWorkload:
    """The samples of a file.

    Args:
        is_repeated: starts again at the file's end, until the run has enough.
        rounds: how often it was begun; more than one warms prefix caches, which people should be told.
    """

    path: Path
    is_repeated: bool
    on_bad: OnBad = OnBad.SKIP
    prompts: PromptMaker | None = None
    seed: int = 0
    tell_bad: TellBad = lambda line, reason: None
    rounds: int = field(default=0, init=False)

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name

    def open(self) -> Iterator[Sample]:
        """Gives the samples.

        Raises:
            ConfigError: as ``open_samples``; or no line is a request.
        """
        num_samples = 0
        tell_bad = self.tell_bad
        while self.is_repeated or self.rounds == 0:
            self.rounds += 1
            found = open_samples(self.path, on_bad=self.on_bad, tell_bad=tell_bad, prompts=self.prompts, seed=self.seed)
            for sample in found:
                num_samples += 1
                yield sample
            if not num_samples:
                raise ConfigError(f"{self.path} holds no request that can be sent")
            tell_bad = _say_nothing  # each bad line is told once


def _say_nothing(_line: int, _reason: str) -> None:
    return


@dataclass(frozen=True, slots=True)
class MadeUpWorkload:
    """Prompts of drawn lengths, cut out of running text; never the same twice.

    Args:
        prompt_tokens: of a prompt, or of each text that is embedded or ranked.
        output_tokens: asked for as ``max_tokens``.
        prefix_tokens: that all prompts begin with: what a prefix cache would find.
        must_fill: asks the server to go on past the end of the text (``ignore_eos``): answers have their length.
    """

    operation: Operation
    prompt_tokens: Spread
    output_tokens: Spread
    prompts: PromptMaker
    prefix_tokens: int = 0
    must_fill: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """For people."""
        name = f"made up: {self.prompt_tokens} tokens in"
        if self.prefix_tokens:
            name += f", the first {self.prefix_tokens} shared"
        return f"{name}, {self.output_tokens} out" if self.operation in ("chat", "completions") else name

    def open(self) -> Iterator[Sample]:
        """Gives samples without end; the same seed gives the same."""
        lengths = random.Random(self.seed)  # noqa: S311 - load that repeats itself is the point
        places = np.random.default_rng(self.seed)
        prefix = self.prompts.block(self.seed, self.prefix_tokens) if self.prefix_tokens else ""

        def text() -> str:
            num_tokens = max(1, round(self.prompt_tokens.draw(lengths)))
            return self.prompts.extend(prefix, num_tokens, places)

        for _ in itertools.count():
            body: dict[str, object]
            match self.operation:
                case "chat":
                    body = {"messages": [{"role": "user", "content": text()}]}
                case "completions":
                    body = {"prompt": text()}
                case "embeddings":
                    body = {"input": text()}
                case "rerank":
                    body = {"query": text(), "documents": [text() for _ in range(_DOCUMENTS)]}
            if self.operation in ("chat", "completions"):
                body["max_tokens"] = max(1, round(self.output_tokens.draw(lengths)))
                if self.must_fill:
                    body["ignore_eos"] = True
            yield Sample(self.operation, body)
