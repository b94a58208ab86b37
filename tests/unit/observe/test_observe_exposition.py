"""Snapshots as Prometheus text, read back with the official parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.base.catalogue import METRICS
from headrace.base.recorder import Recorder
from headrace.observe.exposition import ALIASES, expose
from headrace.observe.process import WorkerMeter
from headrace.protocol.frames import Status, WorkerState


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_of_the_catalogue_has_help_and_type() -> None:
    text = expose(Recorder().snapshot())

    for name, metric in METRICS.items():
        assert f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n" in text
    for alias in ALIASES:
        assert f"# HELP {alias} " in text


def test_values_come_through_with_their_labels() -> None:
    recorder = Recorder()
    recorder.count("headrace_requests_total", model="m", endpoint="chat", outcome='a"b\\c\nd')
    recorder.gauge("headrace_requests_running", 3, model="m")

    read = samples(expose(recorder.snapshot(), models=["m", "n"]))

    labels = (("endpoint", "chat"), ("model", "m"), ("outcome", 'a"b\\c\nd'))
    assert read["headrace_requests_total", labels] == 1
    assert [read["headrace_requests_running", (("model", name),)] for name in "mn"] == [3, 0]
    assert [read["vllm:num_requests_running", (("model_name", name),)] for name in "mn"] == [3, 0]


def test_histogram_buckets_add_up() -> None:
    recorder = Recorder()
    for value in (0.0005, 0.02, 0.02, 9999.0):
        recorder.observe("headrace_time_to_first_token_seconds", value, model="m")

    read = samples(expose(recorder.snapshot()))

    name = "headrace_time_to_first_token_seconds"
    assert read[f"{name}_bucket", (("le", "0.001"), ("model", "m"))] == 1
    assert read[f"{name}_bucket", (("le", "0.025"), ("model", "m"))] == 3
    assert read[f"{name}_bucket", (("le", "600"), ("model", "m"))] == 3
    assert read[f"{name}_bucket", (("le", "+Inf"), ("model", "m"))] == 4
    assert read[f"{name}_count", (("model", "m"),)] == 4
    assert read["vllm:time_to_first_token_seconds_count", (("model_name", "m"),)] == 4


def status(num_steps: int, **values: int) -> Status:
    blocks = {"free_blocks": 5, "evictable_blocks": 2, "total_blocks": 10}
    return Status(WorkerState.READY, num_steps, 1, 2, predicted_step_s=0.01, **blocks, **values)


def test_a_restarted_worker_does_not_turn_counters_back() -> None:
    recorder = Recorder()
    meter = WorkerMeter(recorder, "m")

    meter.note(status(100), is_ready=True)
    meter.note(status(150), is_ready=True)
    meter.note(None, is_ready=False)
    meter.note(status(30), is_ready=True)

    read = samples(expose(recorder.snapshot()))
    assert read["headrace_engine_steps_total", (("model", "m"),)] == 180
    assert read["headrace_kv_blocks", (("model", "m"), ("state", "used"))] == 3
    assert read["headrace_kv_usage_ratio", (("model", "m"),)] == 0.3
