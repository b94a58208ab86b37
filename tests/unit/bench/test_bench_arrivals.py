"""Schedules of an open loop, and settings that contradict themselves."""

from __future__ import annotations

import itertools
import statistics

import msgspec
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.arrivals import arrival_times, check_settings
from headrace.bench.load import choose_processes
from headrace.bench.records import Settings

OPEN = Settings(url="http://h", model="m", rate_per_s=50.0)


def test_constant_arrivals_are_evenly_spaced_and_never_drift() -> None:
    settings = msgspec.structs.replace(OPEN, arrivals="constant", rate_per_s=3.0)

    times = list(itertools.islice(arrival_times(settings), 3001))

    assert times[0] == 0.0
    assert times[3000] == 1000.0


def test_poisson_arrivals_have_the_rate_and_the_spread_of_an_exponential() -> None:
    times = list(itertools.islice(arrival_times(OPEN), 20_000))

    gaps = [after - before for before, after in itertools.pairwise(times)]
    # Mean and standard deviation of an exponential are both 1 ÷ rate; four standard errors of 20,000 draws are 3 %.
    assert statistics.fmean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.06)


def test_poisson_arrivals_repeat_with_their_seed_alone() -> None:
    first, again, other = (
        list(itertools.islice(arrival_times(msgspec.structs.replace(OPEN, seed=seed)), 5)) for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other


def test_a_ramp_rises_evenly_from_the_first_rate_to_the_last() -> None:
    settings = msgspec.structs.replace(OPEN, arrivals="ramp", rate_per_s=10.0, ramp_to_per_s=30.0, duration_s=10.0)

    times = list(arrival_times(settings))

    assert len(times) == pytest.approx(200, abs=1)  # the mean rate is 20
    assert sum(time < 5 for time in times) == pytest.approx(75, abs=1)  # the mean of the first half is 15
    assert times[1] - times[0] == pytest.approx(1 / 10, rel=0.02)
    assert times[-1] - times[-2] == pytest.approx(1 / 30, rel=0.02)


def test_a_ramp_may_fall_to_almost_nothing() -> None:
    settings = msgspec.structs.replace(OPEN, arrivals="ramp", rate_per_s=20.0, ramp_to_per_s=0.1, duration_s=10.0)

    assert len(list(arrival_times(settings))) == pytest.approx(100, abs=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"concurrency": 3}, "given: --concurrency and --rate"),
        ({"rate_per_s": None}, "given: none of them"),
        ({"rate_per_s": 0.0}, "--rate is 0; it must be above 0"),
        ({"rate_per_s": float("inf")}, "--rate is inf"),
        ({"num_requests": 0}, "--num-requests is 0"),
        ({"arrivals": "ramp"}, "needs --rate, --ramp-to and --duration"),
        ({"ramp_to_per_s": 9.0}, "goes with --arrivals ramp"),
        ({"arrivals": "trace"}, "--rate and --arrivals trace"),
        ({"warmup_requests": 1, "warmup_s": 1.0}, "not both"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(msgspec.structs.replace(OPEN, **changes))


def test_processes_grow_with_the_load_and_stop_at_half_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    chosen = [choose_processes(msgspec.structs.replace(OPEN, rate_per_s=rate)) for rate in (5.0, 2500.0, 1e6)]

    assert chosen == [1, 3, 4]
    assert choose_processes(msgspec.structs.replace(OPEN, rate_per_s=None, concurrency=2, processes=4)) == 2
