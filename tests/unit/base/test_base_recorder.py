import pytest

from headrace.base.catalogue import EVENTS, METRICS
from headrace.base.recorder import Recorder


def test_counter_adds_up_by_label_values() -> None:
    recorder = Recorder()

    recorder.count("headrace_requests_total", model="m", endpoint="chat", outcome="ok")
    recorder.count("headrace_requests_total", 2, model="m", outcome="ok", endpoint="chat")
    recorder.count("headrace_requests_total", model="m", endpoint="chat", outcome="aborted")

    assert recorder.snapshot().counters == {
        "headrace_requests_total": {("m", "chat", "ok"): 3, ("m", "chat", "aborted"): 1}
    }


def test_gauge_keeps_the_last_value() -> None:
    recorder = Recorder()

    recorder.gauge("headrace_connections_open", 3)
    recorder.gauge("headrace_connections_open", 1)

    assert recorder.snapshot().gauges == {"headrace_connections_open": {(): 1.0}}


def test_histogram_puts_a_bound_into_its_own_bucket_and_the_rest_into_the_last() -> None:
    recorder = Recorder()
    name = "headrace_event_loop_lag_seconds"
    bound = METRICS[name].buckets[3]

    recorder.observe(name, bound)
    recorder.observe(name, bound * 1.0001)
    recorder.observe(name, 1e9)

    value = recorder.snapshot().histograms[name][()]
    assert (value.counts[3], value.counts[4], value.counts[-1], value.count) == (1, 1, 1, 3)
    assert value.sum == pytest.approx(1e9 + 2 * bound, rel=1e-9)


def test_snapshot_does_not_change_later() -> None:
    recorder = Recorder()
    recorder.count("headrace_engine_steps_total", model="m")

    before = recorder.snapshot()
    recorder.count("headrace_engine_steps_total", model="m")

    assert before.counters["headrace_engine_steps_total"] == {("m",): 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda r: r.count("headrace_nonsense_total"), id="unknown name"),
        pytest.param(lambda r: r.count("headrace_connections_open"), id="wrong kind"),
        pytest.param(lambda r: r.count("headrace_requests_total", endpoint="a"), id="missing label"),
        pytest.param(lambda r: r.count("headrace_engine_steps_total", -1, model="m"), id="going back"),
    ],
)
def test_misuse_is_our_own_bug(wrong: object) -> None:
    with pytest.raises(AssertionError):
        wrong(Recorder())  # type: ignore[operator]


def test_catalogue_keeps_its_own_rules() -> None:
    for metric in METRICS.values():
        assert metric.help.endswith("."), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
    assert all(meaning and name.islower() for name, meaning in EVENTS.items())
