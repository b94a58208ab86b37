"""What an encoder makes of token ids, by the worker's own parts without the worker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.base.clock import SystemClock
from headrace.engine.encode_scheduler import EncodeScheduler
from headrace.engine.loader import inspect, load
from headrace.protocol.frames import Encode, Encoded, pack_ids
from headrace.protocol.launch import WorkerLaunch


def encoded(
    folder: Path, texts: Sequence[list[int]], second_starts: Sequence[int] = (), **launch: object
) -> npt.NDArray[np.float32]:
    """Returns [texts, width], as the worker would make them.

    Args:
        launch: fields of WorkerLaunch; the exact path on two threads by default.
    """
    settings = {"socket_fd": -1, "threads": 2, "dtype": "fp32", **launch}
    inspection = inspect(WorkerLaunch(str(folder), "encoder", **settings))  # type: ignore[arg-type]  # named fields
    loaded = load(inspection, SystemClock())
    assert inspection.encode_config is not None, "the model makes no vectors"
    scheduler = EncodeScheduler(inspection.encode_config)
    scheduler.submit(0, Encode("r", [pack_ids(ids) for ids in texts], second_starts=list(second_starts)), 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.complete(plan, loaded.executor.run(plan), 0.0)
    events = [event for event in scheduler.take_events()[0] if isinstance(event, Encoded)]
    return np.stack([np.frombuffer(event.vector, "<f4") for event in events])
