"""Times the steps of a model that makes vectors: many texts of one length, as the worker runs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.base.clock import Clock
from headrace.engine.encode_scheduler import EncodeScheduler
from headrace.engine.loader import Inspection, Loaded
from headrace.program.cost import Work, step_cost
from headrace.protocol.frames import Encode, Step, encode_frame, pack_ids

SHAPES = ((1, 32), (1, 256), (32, 32), (32, 256))
"""Texts at a time, and tokens of each."""
_LEAST_RUNS = 5
_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class EncodeTimes:
    """Raw times of one shape, one entry a batch: seconds in all, and of that outside the VM."""

    times_s: list[float]
    overheads_s: list[float]
    bytes_moved: int
    operations: int


def time_encoding(inspection: Inspection, loaded: Loaded, clock: Clock, num_texts: int, length: int) -> EncodeTimes:
    """Times whole batches of fresh random texts, from Encode to the frames that go out.

    Args:
        length: tokens of each text, at most the model's context.
    """
    config = inspection.encode_config
    assert config is not None, "the model generates"
    scheduler = EncodeScheduler(config)
    random = np.random.default_rng(0)
    times_s: list[float] = []
    overheads_s: list[float] = []
    while len(times_s) <= _LEAST_RUNS or sum(times_s) < _LEAST_S:
        texts = random.integers(0, config.vocab_size, (num_texts, length)).tolist()
        started_at_s = clock.now_s()
        scheduler.submit(
            0, Encode(f"bench-{len(times_s)}", [pack_ids(ids) for ids in texts], form=config.forms[0]), started_at_s
        )
        vm_s = 0.0
        while (plan := scheduler.plan(clock.now_s())) is not None:
            before_s = clock.now_s()
            vectors: Any = loaded.executor.run(plan)
            vm_s += clock.now_s() - before_s
            scheduler.complete(plan, vectors, clock.now_s())
        encode_frame(Step(scheduler.take_events()[0]))
        times_s.append(clock.now_s() - started_at_s)
        overheads_s.append(times_s[-1] - vm_s)
    per_step = max(1, min(config.max_step_tokens // length, config.max_sequences, num_texts))
    moved = done = 0
    for first in range(0, num_texts, per_step):
        count = min(per_step, num_texts - first)
        work = Work(count * length, 0, [length] * (count * length), sequences=count)
        cost = step_cost(inspection.program, inspection.layouts, inspection.kv_type, work)
        moved, done = moved + cost.bytes_moved, done + cost.operations
    return EncodeTimes(times_s[1:], overheads_s[1:], moved, done)
