"""How late the generator is: in bounded memory, and honest about what was missed."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.bench import lag
from headrace.bench.lag import LagMeter, Readings, summarize_lags
from headrace.bench.timer import Timer


def test_percentiles_are_nearest_ranks_and_nothing_is_zero() -> None:
    found = summarize_lags([index / 1000 for index in range(101)])

    assert (found.p50_s, found.p99_s, found.max_s) == (0.050, 0.099, 0.100)
    assert summarize_lags([]).max_s == 0.0


def test_many_readings_are_sampled_evenly_and_the_largest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "MAX_READINGS", 64)
    readings = Readings()

    for value in range(10_000):
        readings.add(float(value))
    readings.add(1e6)
    values = sorted(readings.values())

    assert len(values) <= 65
    assert values[-1] == 1e6
    # Every 256th number: the median is that of all, give or take one such step.
    assert values[len(values) // 2] == pytest.approx(5000, abs=260)


async def test_a_loop_that_stands_still_is_seen_as_late_as_it_was() -> None:
    timer = Timer(asyncio.get_running_loop())
    meter = LagMeter(timer)
    meter.start(time.monotonic())
    await asyncio.sleep(0.03)

    time.sleep(0.1)  # noqa: ASYNC251 - standing still is what is measured
    await asyncio.sleep(0.03)
    meter.stop()
    timer.close()

    assert max(meter.lags_s.values()) > 0.08


async def test_a_timer_calls_in_order_never_early_and_not_what_was_cancelled() -> None:
    timer = Timer(asyncio.get_running_loop())
    start_s = time.monotonic()
    calls: list[tuple[str, float]] = []
    done = asyncio.Event()

    def note(name: str) -> None:
        calls.append((name, time.monotonic() - start_s))

    timer.call_at(start_s + 0.030, lambda: (note("third"), done.set()))
    timer.call_at(start_s + 0.0101, lambda: note("second"))
    timer.call_at(start_s - 1.0, lambda: note("first"))
    timer.call_at(start_s + 0.020, lambda: note("never")).cancel()
    await done.wait()
    timer.close()

    assert [name for name, _ in calls] == ["first", "second", "third"]
    assert calls[1][1] >= 0.0101 - 20e-6
    assert calls[2][1] >= 0.030 - 20e-6
