"""Headrace's engine without HTTP: encode_headrace.py FORMAT MODEL. Runs in Headrace's own environment."""

from __future__ import annotations

import sys
from statistics import median

import wire

from headrace.base.clock import SystemClock
from headrace.engine.encode_bench import time_encoding
from headrace.engine.loader import inspect, load
from headrace.protocol.launch import WorkerLaunch

FORMAT, MODEL = sys.argv[1:3]
clock = SystemClock()
inspection = inspect(
    WorkerLaunch(
        MODEL,
        "encoder",
        -1,
        threads=wire.threads(),
        dtype="fp32" if FORMAT == "fp32" else "bf16",
        quantization="int8" if FORMAT == "int8" else "none",
    )
)
loaded = load(inspection, clock, lambda stage, ratio: None)


def measure(texts: int, tokens: int, seconds: float) -> wire.Answer:
    """Times whole batches of fresh texts, from the request to the frames that go out; it runs about a second."""
    times = time_encoding(inspection, loaded, clock, texts, tokens)
    return {"tokens": texts, "seconds": median(times.times_s)}


wire.serve({"encode": measure})
