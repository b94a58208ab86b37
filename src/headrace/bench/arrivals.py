"""When requests are meant to be sent in an open loop: moments that do not wait for any answer."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from headrace.base.errors import ConfigError
from headrace.bench.records import Settings


def check_settings(settings: Settings) -> None:
    """Refuses settings that contradict themselves.

    Raises:
        ConfigError: naming the option, its value and what is possible.
    """
    is_trace = settings.arrivals == "trace"
    given = [
        name
        for name, is_given in (
            ("--concurrency", settings.concurrency is not None),
            ("--rate", settings.rate_per_s is not None),
            ("--arrivals trace", is_trace),
        )
        if is_given
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ConfigError(f"one of --concurrency, --rate and --arrivals trace says how to send; given: {found}")
    positive: list[tuple[str, float | None]] = [
        ("--concurrency", settings.concurrency),
        ("--rate", settings.rate_per_s),
        ("--ramp-to", settings.ramp_to_per_s),
        ("--num-requests", settings.num_requests),
        ("--duration", settings.duration_s),
        ("--timeout", settings.timeout_s),
        ("--processes", settings.processes),
        ("--trace-speed", settings.trace_speed),
    ]
    for name, value in positive:
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"{name} is {value:g}; it must be above 0")
    if settings.warmup_requests and settings.warmup_s:
        raise ConfigError("the warm-up is either a number of requests or a time, not both")
    if settings.arrivals == "ramp":
        if settings.ramp_to_per_s is None or settings.duration_s is None:
            raise ConfigError("--arrivals ramp needs --rate, --ramp-to and --duration: from, to and how long")
    elif settings.ramp_to_per_s is not None:
        raise ConfigError("--ramp-to goes with --arrivals ramp")


def arrival_times(settings: Settings) -> Iterator[float]:
    """Gives the moments of an open loop in seconds since the run's start, without end but for a ramp's.

    Poisson: gaps drawn from an exponential distribution, the memoryless arrival of many independent users. Constant:
    all gaps alike. Ramp: constant, the rate rising evenly; the warm-up runs at the first rate.
    """
    rate = settings.rate_per_s
    assert rate is not None, "checked by check_settings"
    match settings.arrivals:
        case "poisson":
            rng = random.Random(settings.seed)  # noqa: S311 - a schedule that repeats itself is the point
            at_s = 0.0
            while True:
                at_s += rng.expovariate(rate)
                yield at_s
        case "constant":
            yield from (number / rate for number in itertools.count())
        case "ramp":
            yield from _ramp(rate, settings)
        case "trace":
            raise AssertionError("a trace's times come with its samples")


def _ramp(rate: float, settings: Settings) -> Iterator[float]:
    last, over_s, start_s = settings.ramp_to_per_s, settings.duration_s, settings.warmup_s
    assert last is not None, "checked by check_settings"
    assert over_s is not None, "checked by check_settings"
    yield from (number / rate for number in range(math.ceil(start_s * rate)))
    slope = (last - rate) / over_s  # per second²
    for number in itertools.count():
        # number = rate·t + slope·t²/2, solved for t ≥ 0 in the form that is stable near slope 0
        root = rate * rate + 2 * slope * number
        if root < 0:
            return
        at_s = 2 * number / (rate + math.sqrt(root))
        if at_s > over_s:
            return
        yield start_s + at_s
