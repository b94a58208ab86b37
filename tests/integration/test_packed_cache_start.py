"""The second start of a model reads its packed weights; a damaged cache changes nothing but the time it takes."""

from __future__ import annotations

import contextlib
import io
import json
import threading
from pathlib import Path

import pytest

from headrace.base.clock import SystemClock
from headrace.engine import packed_cache
from headrace.engine.loader import inspect, load
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.determinism import make_requests, run_together
from headrace.testing.machine import Machine
from headrace.testing.tiny import write_tiny_gguf


def start(model: Path, folder: Path | None) -> tuple[dict[str, list[object]], list[str]]:
    """Loads the model, runs seeded requests, and returns what they heard and what the cache logged."""
    launch = WorkerLaunch(
        model_path=str(model),
        served_name="tiny",
        socket_fd=-1,
        max_context_tokens=128,
        kv_cache_tokens=4096,
        packed_cache_path=str(folder) if folder else None,
    )
    inspection = inspect(launch)
    with contextlib.redirect_stderr(io.StringIO()) as log:
        machine = Machine(inspection.scheduler_config, load(inspection, SystemClock()).vm)
        for thread in threading.enumerate():
            if thread.name == "packed-weights":
                thread.join()
    events = [json.loads(line)["event"] for line in log.getvalue().splitlines()]
    heard = run_together(machine, make_requests(8, vocab_size=320, longest_prompt=40, max_tokens=12))
    return heard, [event for event in events if event.startswith("packed_")]


def test_second_start_reads_and_a_flipped_byte_is_packed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_gguf(tmp_path / "m.gguf", matrix_type="Q4_1", embedding_type="Q8_0")
    monkeypatch.setattr(packed_cache, "_RACE_NS", 0)  # the file is new, and nobody changes it
    folder = tmp_path / "packed"

    without, no_events = start(model, None)
    first, first_events = start(model, folder)
    second, second_events = start(model, folder)
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    third, third_events = start(model, folder)
    fourth, fourth_events = start(model, folder)

    assert no_events == []
    assert first_events == ["packed_weights_saved"]
    assert second_events == ["packed_weights_read"]
    assert third_events == ["packed_weights_damaged", "packed_weights_saved"]
    assert fourth_events == ["packed_weights_read"]
    assert without == first == second == third == fourth
