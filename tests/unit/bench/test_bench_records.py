"""Runs on disk: what is written is what is read, and damage is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import RequestError
from headrace.bench.records import (
    SCHEMA,
    Environment,
    Exchange,
    Lag,
    Overhead,
    RunStart,
    RunWriter,
    Settings,
    encode_exchange,
    read_run,
)
from headrace.bench.sample import Sample, request_body

START = RunStart(
    headrace_run=SCHEMA,
    started_at_s=1_700_000_000.0,
    settings=Settings(url="http://127.0.0.1:1", model="m", rate_per_s=5.0, num_requests=2),
    environment=Environment(headrace="0", python="3", system="Linux", cpu="x", num_cpus=2, load_average=0.5),
)
OVERHEAD = Overhead(
    processes=1, loop_lag=Lag(0.001, 0.002, 0.003), send_lag=Lag(0.0, 0.0, 0.0), cpu_s=0.5, busiest_ratio=0.25
)
EXCHANGES = [
    Exchange(0, "chat", 0.0, 0.001, 0.1, 0.3, chunk_s=(0.1, 0.2, 0.3), output_tokens=3, status=200),
    Exchange(1, "chat", 0.2, None, None, 0.4, error="connect", detail="refused", is_warmup=True),
]


def write(path: Path) -> None:
    with RunWriter(path, START) as writer:
        for exchange in EXCHANGES:
            writer.add(encode_exchange(exchange), 1)
        writer.finish(duration_s=0.4, measured_from_s=0.0, is_partial=False, overhead=OVERHEAD, notes=("a note",))


def test_a_run_reads_back_as_it_was_written_any_number_of_times(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl")

    run = read_run(tmp_path / "run.jsonl")

    assert run.start == START
    assert run.end is not None
    assert run.end.overhead == OVERHEAD
    assert run.end.notes == ("a note",)
    assert len(run.exchanges) == 2
    assert list(run.exchanges) == EXCHANGES
    assert list(run.exchanges) == EXCHANGES
    assert not run.is_partial


def test_a_run_that_was_killed_keeps_its_whole_lines(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl")
    content = (tmp_path / "run.jsonl").read_bytes()
    cut = content.index(b'"index":1') + 20
    (tmp_path / "cut.jsonl").write_bytes(content[:cut])

    run = read_run(tmp_path / "cut.jsonl")

    assert run.is_partial
    assert list(run.exchanges) == EXCHANGES[:1]


def test_a_damaged_line_is_named_by_its_number(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl")
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"index": "one"}\n'
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))

    with pytest.raises(RequestError, match=r"bad\.jsonl, line 3, .*index"):
        read_run(tmp_path / "bad.jsonl")


def test_another_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl")
    content = (tmp_path / "run.jsonl").read_bytes().replace(b'"headrace_run":1', b'"headrace_run":9')
    (tmp_path / "new.jsonl").write_bytes(content)

    with pytest.raises(RequestError, match="schema 9"):
        read_run(tmp_path / "new.jsonl")


def test_a_request_gets_model_stream_and_usage_and_the_settings_fields_win() -> None:
    sample = Sample("chat", {"messages": [], "temperature": 1, "model": "theirs"})
    settings = Settings(url="http://h", model="ours", concurrency=1, body={"temperature": 0})

    body = request_body(sample, settings)

    assert body == {
        "messages": [],
        "temperature": 0,
        "model": "ours",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
