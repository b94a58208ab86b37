"""One pass over a run's exchanges: what the figures of a report are computed from.

Held in memory: about eight numbers per request, and the gaps between chunks as a histogram, so 100,000 requests take
some megabytes however long their answers are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import Final

import numpy as np

from headrace.bench.records import Exchange, Run
from headrace.bench.slo import Limit, Metric
from headrace.bench.statistics import NUM_BLOCKS, Floats, Histogram
from headrace.bench.summary import Tokens

_TOKEN_BIN_S: Final = 0.1
_PENDING: Final = 8192


def request_figures(exchange: Exchange) -> dict[Metric, float]:
    """Gives what was measured of one good request, in seconds; only what an answer of its kind has."""
    found: dict[Metric, float] = {"e2e": exchange.ended_s - exchange.scheduled_s}
    chunks = exchange.chunk_s
    if not chunks or exchange.first_s is None:
        return found
    found["ttft"] = exchange.first_s - exchange.scheduled_s
    if len(chunks) > 1:
        found["itl"] = (chunks[-1] - chunks[0]) / (len(chunks) - 1)
        found["gap"] = max(map(sub, chunks[1:], chunks))
    tokens = output_tokens(exchange)
    if tokens > 1:
        found["tpot"] = (chunks[-1] - exchange.first_s) / (tokens - 1)
    return found


def output_tokens(exchange: Exchange) -> int:
    """Gives a request's output tokens: by usage, else by the tokenizer, else one a chunk."""
    for count in (exchange.output_tokens, exchange.output_tokens_counted):
        if count is not None:
            return count
    return len(exchange.chunk_s)


class TokenSums:
    """Sums of token counts over good requests."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._different = 0

    def add(self, exchange: Exchange) -> None:
        """Adds a good request."""
        usage, counted = exchange.output_tokens, exchange.output_tokens_counted
        for name, count in (
            ("prompt_usage", exchange.prompt_tokens),
            ("prompt_counted", exchange.prompt_tokens_counted),
            ("output_usage", usage),
            ("output_counted", counted),
            ("cached", exchange.cached_tokens),
        ):
            if count is not None:
                self._sums[name] += count
                self._seen[name] += 1
        if usage is not None and counted is not None:
            self._sums["both_usage"] += usage
            self._sums["both_counted"] += counted
            self._seen["both"] += 1
            self._different += usage != counted
        if exchange.prompt_tokens is not None and exchange.prompt_tokens_counted is not None:
            self._sums["prompt_difference"] += exchange.prompt_tokens - exchange.prompt_tokens_counted
            self._seen["prompt_both"] += 1
        if usage is not None:
            self._sources["usage"] += 1
        elif counted is not None:
            self._sources["tokenizer"] += 1
        elif exchange.chunk_s:
            self._sources["chunks"] += 1

    def _sum(self, name: str) -> int | None:
        return self._sums[name] if self._seen[name] else None

    def result(self) -> Tokens:
        """Gives what they come to."""
        counted = self._sums["both_counted"]
        prompts = self._seen["prompt_both"]
        return Tokens(
            output_source=" and ".join(name for name, _ in self._sources.most_common()) or "none",
            prompt_usage=self._sum("prompt_usage"),
            prompt_counted=self._sum("prompt_counted"),
            output_usage=self._sum("output_usage"),
            output_counted=self._sum("output_counted"),
            cached=self._sum("cached"),
            num_compared=self._seen["both"],
            output_difference_ratio=(self._sums["both_usage"] - counted) / counted if counted else None,
            num_output_different=self._different,
            prompt_difference_mean=self._sums["prompt_difference"] / prompts if prompts else None,
        )


@dataclass(slots=True)
class Gathered:
    """What one pass over the exchanges leaves. The arrays of one group are in order of ending.

    Args:
        values: by metric, of good requests.
        pending: gaps of ``pending_block`` that are not in ``gaps`` yet.
        ended_s, e2e_s, ttft_s: of good requests; a missing TTFT is NaN.
        is_kept: 1 for a good request that kept every objective.
        failed_s: when the failed ones ended.
        spans_s: scheduled and ended moment of every measured request, one after the other.
        token_bins: output tokens that came in each tenth of a second of the run.
    """

    num_warmup: int = 0
    num_good: int = 0
    num_failed: int = 0
    first_scheduled_s: float = np.inf
    last_ended_s: float = 0.0
    values: dict[str, array[float]] = field(default_factory=dict)
    gaps: Histogram = field(default_factory=Histogram.empty)
    pending: array[float] = field(default_factory=lambda: array("d"))
    pending_block: int = 0
    ended_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    is_kept: array[int] = field(default_factory=lambda: array("b"))
    failed_s: array[float] = field(default_factory=lambda: array("d"))
    spans_s: array[float] = field(default_factory=lambda: array("d"))
    token_bins: Floats = field(default_factory=lambda: np.zeros(1024))
    prompt_tokens: int = 0
    has_prompt_tokens: bool = False
    tokens: TokenSums = field(default_factory=TokenSums)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add_gaps(self, chunk_s: tuple[float, ...], block: int) -> None:
        """Counts the gaps of one request, many requests at a time."""
        if block != self.pending_block or len(self.pending) > _PENDING:
            self.flush()
            self.pending_block = block
        self.pending.extend(map(sub, chunk_s[1:], chunk_s))

    def flush(self) -> None:
        """Counts what is pending."""
        if self.pending:
            self.gaps.add(np.asarray(self.pending, np.float64), self.pending_block)
            self.pending = array("d")

    def add_tokens(self, moments_s: Floats, num: float) -> None:
        """Counts ``num`` tokens that came evenly with these moments."""
        bins = (np.maximum(moments_s, 0) / _TOKEN_BIN_S).astype(np.int64)
        last = int(bins.max())
        if last >= len(self.token_bins):
            self.token_bins = np.concatenate([self.token_bins, np.zeros(max(last, len(self.token_bins)))])
        np.add.at(self.token_bins, bins, num / len(bins))

    def token_times(self) -> tuple[Floats, Floats]:
        """Gives moments in the run and the output tokens that came at each."""
        used = np.flatnonzero(self.token_bins)
        return ((used + 0.5) * _TOKEN_BIN_S).astype(np.float64), self.token_bins[used]


def gather(run: Run, objectives: tuple[Limit, ...]) -> Gathered:
    """Goes through the exchanges once; warm-up is only counted."""
    gathered = Gathered()
    num = max(len(run.exchanges), 1)
    for position, exchange in enumerate(run.exchanges):
        if exchange.is_warmup:
            gathered.num_warmup += 1
            continue
        gathered.first_scheduled_s = min(gathered.first_scheduled_s, exchange.scheduled_s)
        gathered.last_ended_s = max(gathered.last_ended_s, exchange.ended_s)
        gathered.spans_s.extend((exchange.scheduled_s, exchange.ended_s))
        if exchange.error is not None:
            gathered.num_failed += 1
            gathered.failed_s.append(exchange.ended_s)
            kind = f"status {exchange.status}" if exchange.error == "status" else exchange.error
            gathered.errors[kind] += 1
            gathered.examples.setdefault(kind, exchange.detail)
            continue
        _add_good(gathered, exchange, objectives, position * NUM_BLOCKS // num)
    gathered.flush()
    if gathered.first_scheduled_s == np.inf:
        gathered.first_scheduled_s = 0.0
    return gathered


def _add_good(gathered: Gathered, exchange: Exchange, objectives: tuple[Limit, ...], block: int) -> None:
    gathered.num_good += 1
    figures: Mapping[Metric, float] = request_figures(exchange)
    for name, value in figures.items():
        if name != "itl":
            gathered.values.setdefault(name, array("d")).append(value)
    tokens = output_tokens(exchange)
    if exchange.chunk_s and exchange.first_s is not None and exchange.sent_s is not None:
        gathered.values.setdefault("ttft_sent", array("d")).append(exchange.first_s - exchange.sent_s)
    if exchange.chunk_s and tokens:
        gathered.values.setdefault("tpot_first", array("d")).append(figures["e2e"] / tokens)
    if len(exchange.chunk_s) > 1:
        gathered.add_gaps(exchange.chunk_s, block)
    # A request without a figure (one chunk has no gap) cannot have broken its objective.
    gathered.is_kept.append(all(figures.get(limit.metric, 0.0) <= limit.limit_s for limit in objectives))
    gathered.ended_s.append(exchange.ended_s)
    gathered.ttft_s.append(figures.get("ttft", np.nan))
    if tokens:
        gathered.add_tokens(np.asarray(exchange.chunk_s or (exchange.ended_s,)), tokens)
    prompt = exchange.prompt_tokens if exchange.prompt_tokens is not None else exchange.prompt_tokens_counted
    if prompt is not None:
        gathered.has_prompt_tokens = True
        gathered.prompt_tokens += prompt
    gathered.tokens.add(exchange)
    if exchange.finish_reason is not None:
        gathered.finish_reasons[exchange.finish_reason] += 1
