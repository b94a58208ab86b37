"""What a load run comes to: the figures of a report, and their versioned JSON form.

Everything a report shows is in a ``Summary``; writing pages computes nothing. The schema that is committed beside the
reference pages is made of these classes. A field may be added under the same number; a change of meaning takes a new
number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from headrace.base.errors import RequestError
from headrace.bench.records import Environment, Overhead, Settings
from headrace.bench.slo import Limit

SCHEMA: Final = 1
# Above these the generator, not the server, may be what was measured.
MAX_LAG_P99_S: Final = 0.005
MAX_BUSY_RATIO: Final = 0.9


class Percentile(msgspec.Struct, frozen=True):
    """One percentile in seconds.

    Args:
        quantile: in (0, 1).
        value_s: nearest rank.
        low_s, high_s: ends of its 95 % interval.
        is_indicative: it rests on fewer than ten requests beyond it.
    """

    quantile: float
    value_s: float
    low_s: float
    high_s: float
    is_indicative: bool


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of latency was distributed over good requests.

    Args:
        num: values; of ``itl`` these are gaps, else requests.
        mean_low_s, mean_high_s: ends of the mean's 95 % interval.
        cdf_s: the percentiles 0, 0.5, 1, … 100: 201 values, for drawing.
    """

    num: int
    mean_s: float
    mean_low_s: float
    mean_high_s: float
    min_s: float
    max_s: float
    percentiles: tuple[Percentile, ...]
    cdf_s: tuple[float, ...]

    def at(self, quantile: float) -> Percentile:
        """Gives one of the percentiles."""
        return next(found for found in self.percentiles if found.quantile == quantile)


class Rate(msgspec.Struct, frozen=True):
    """Something per second, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """What was done per second of the measured time; None where no token counts are known.

    Args:
        requests_per_s: good ones.
        goodput_per_s: good ones that kept every objective; None without objectives.
        good_ratio: share of all measured requests, failed ones too, that did.
    """

    requests_per_s: Rate
    output_tokens_per_s: Rate | None
    prompt_tokens_per_s: float | None
    goodput_per_s: Rate | None
    good_ratio: float | None


class ErrorCount(msgspec.Struct, frozen=True):
    """Failures of one kind.

    Args:
        kind: of ``records.ErrorKind``; for ``status`` with the status behind it: ``status 503``.
        example: what the first one said.
    """

    kind: str
    num: int
    ratio: float
    example: str


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of good requests, by the server's usage and by our tokenizer; None where there are none.

    Args:
        output_source: which count throughput and TPOT rest on; ``chunks`` when nothing better is there: one a chunk.
        num_compared: requests with output counts of both kinds.
        output_difference_ratio: (usage − tokenizer) ÷ tokenizer over those requests.
        num_output_different: of those, requests whose two counts are not equal.
        prompt_difference_mean: usage − tokenizer per request; a chat template's own tokens appear here.
    """

    output_source: str
    prompt_usage: int | None
    prompt_counted: int | None
    output_usage: int | None
    output_counted: int | None
    cached: int | None
    num_compared: int
    output_difference_ratio: float | None
    num_output_different: int
    prompt_difference_mean: float | None


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the run, for drawing: requests by their end, tokens by their arrival.

    Args:
        start_s: since the run's start; slices are equally long.
        in_flight: requests unanswered at its middle.
        ttft_p50_s … e2e_p95_s: None where no good request ended.
    """

    start_s: float
    num_good: int
    num_failed: int
    in_flight: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    e2e_p50_s: float | None
    e2e_p95_s: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run's figures.

    Args:
        headrace_report: number of this schema.
        started_at_s: since 1970 UTC.
        measured_s: seconds that the figures rest on, from the warm-up's end to the last answer.
        is_partial: it was stopped before its end.
        num_warmup: exchanges that were left out.
        latency: by name: ttft, ttft_sent, itl, gap, tpot, tpot_first, e2e; only those that were measured.
        definitions: what each name means.
        finish_reasons: of good requests.
        notes: what people should know, in sentences.
    """

    headrace_report: int
    started_at_s: float
    settings: Settings
    environment: Environment
    overhead: Overhead | None
    objectives: tuple[Limit, ...]
    measured_s: float
    is_partial: bool
    num_warmup: int
    num_good: int
    num_failed: int
    latency: dict[str, Latency]
    definitions: dict[str, str]
    throughput: Throughput
    tokens: Tokens
    errors: tuple[ErrorCount, ...]
    finish_reasons: dict[str, int]
    slice_s: float
    slices: tuple[Slice, ...]
    notes: tuple[str, ...]

    @property
    def num_measured(self) -> int:
        """Requests that the figures rest on."""
        return self.num_good + self.num_failed

    @property
    def generator_lag_s(self) -> float:
        """How late the generator itself was in 99 of 100 cases."""
        return max(self.overhead.loop_lag.p99_s, self.overhead.send_lag.p99_s) if self.overhead is not None else 0.0


DEFINITIONS: Final[dict[str, str]] = {
    "ttft": "Time to first token: from the moment a request was due to the first chunk with output.",
    "ttft_sent": "The same, from the moment it was handed to the network; the difference is waiting on our side.",
    "itl": "Inter-token latency: every gap between chunks with output, of all requests together.",
    "gap": "The longest gap between chunks of a request: its worst stall.",
    "tpot": "Time per output token: from first to last chunk, divided by the tokens after the first.",
    "tpot_first": "The same with the first token and its waiting: whole latency divided by all output tokens.",
    "e2e": "End to end: from the moment a request was due to the last byte of its answer.",
}


def _anything(_kind: type) -> dict[str, object]:
    return {"description": "any JSON value"}  # `object`, the fields of the requests' body, is the only such type


def schema() -> dict[str, object]:
    """Gives the JSON schema of a report."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **msgspec.json.schema(Summary, schema_hook=_anything),
    }


class _Version(msgspec.Struct, frozen=True):
    headrace_report: int


def read_summary(path: Path) -> Summary:
    """Gives the report that a JSON file holds.

    Raises:
        RequestError: it is none, or of another schema.
    """
    try:
        content = path.read_bytes()
        number = msgspec.json.decode(content, type=_Version).headrace_report
        if number != SCHEMA:
            raise RequestError(f"{path} has schema {number} of reports; this version reads {SCHEMA}")
        return msgspec.json.decode(content, type=Summary)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise RequestError(f"{path} is no report of a load run: {error}") from error
