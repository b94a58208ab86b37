"""What an encoder makes of token ids, by the worker's own parts without the worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.clock import SystemClock
from headrace.engine.encode_scheduler import EncodeScheduler
from headrace.engine.loader import inspect, load
from headrace.protocol.frames import Encode, Encoded, EncodeForm, pack_ids
from headrace.protocol.launch import WorkerLaunch

Float32s = npt.NDArray[np.float32]


def encoded(
    folder: Path, texts: Sequence[list[int]], second_starts: Sequence[int] = (), **launch: object
) -> npt.NDArray[np.float32]:
    """Returns [texts, width], as the worker would make them.

    Args:
        launch: fields of WorkerLaunch; the exact path on two threads by default.
    """
    packed = [pack_ids(ids) for ids in texts]
    return np.stack(results_of(folder, Encode("r", packed, second_starts=list(second_starts)), **launch))


def encoded_rows(folder: Path, texts: Sequence[list[int]], **launch: object) -> list[Float32s]:
    """Returns what the model makes of each token, [tokens, width] a text."""
    flat = results_of(folder, Encode("r", [pack_ids(ids) for ids in texts], form=EncodeForm.ROWS), **launch)
    return [found.reshape(len(ids), -1) for found, ids in zip(flat, texts, strict=True)]


def encoded_masks(
    folder: Path, texts: Sequence[list[int]], marks: Sequence[list[int]], num_top: int, **launch: object
) -> list[Float32s]:
    """Returns the likeliest tokens at the marks of each text and their probabilities, [marks, num_top, 2]."""
    packed = [pack_ids(ids) for ids in texts]
    request = Encode("r", packed, form=EncodeForm.MASKED, marks=list(marks), num_top=num_top)
    return [found.reshape(-1, num_top, 2) for found in results_of(folder, request, **launch)]


def results_of(folder: Path, request: Encode, **launch: object) -> list[Float32s]:
    """Returns the flat result of each input."""
    settings = {"socket_fd": -1, "threads": 2, "dtype": "fp32", **launch}
    inspection = inspect(WorkerLaunch(str(folder), "encoder", **settings))  # type: ignore[arg-type]  # named fields
    loaded = load(inspection, SystemClock())
    assert inspection.encode_config is not None, "the model makes no vectors"
    scheduler = EncodeScheduler(inspection.encode_config)
    scheduler.submit(0, request, 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.complete(plan, loaded.executor.run(plan), 0.0)
    events = [event for event in scheduler.take_events()[0] if isinstance(event, Encoded)]
    return [np.frombuffer(event.vector, "<f4") for event in events]
