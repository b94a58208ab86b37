"""Whether a worker is alive: it has finished a step lately while work was waiting, and it says something.

Pure: fed with frames and ticks, it gives a verdict. Idle, loading or saturated is not dead: a saturated worker steps.
Time is counted in ticks that really happened, so a supervisor that was itself suspended or starved blames nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.protocol.frames import Status, WorkerState


@dataclass(frozen=True, slots=True)
class LivenessConfig:
    """Limits in seconds.

    Args:
        tick_s: time between two ticks; a longer gap counts as two ticks at most.
        silent_s: no frame, or no step with work waiting, for this long (at least ``step_factor`` predicted steps).
        step_factor: predicted steps that a worker may take without being called hung.
        loading_silent_s: no frame for this long while loading.
        start_s: no Welcome for this long after the start.
    """

    tick_s: float = 0.25
    silent_s: float = 10.0
    step_factor: float = 5.0
    loading_silent_s: float = 120.0
    start_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Liveness:
    """What is known of one worker process.

    Args:
        status: its last Status, None before the first.
        silent_s: since its last frame, or its start.
        stepless_s: since its step counter moved or it had no work.
    """

    status: Status | None = None
    silent_s: float = 0.0
    stepless_s: float = 0.0


def hear(view: Liveness, status: Status | None) -> Liveness:
    """Gives the view after a frame; ``status`` is None for a frame that is no Status."""
    if status is None:
        return replace(view, silent_s=0.0)
    before = view.status
    has_work = status.num_running + status.num_waiting > 0
    has_stepped = before is None or status.num_steps != before.num_steps
    is_loading = status.state is WorkerState.LOADING
    stepless_s = 0.0 if has_stepped or not has_work or is_loading else view.stepless_s
    return Liveness(status, 0.0, stepless_s)


def tick(view: Liveness, elapsed_s: float, config: LivenessConfig) -> Liveness:
    """Gives the view ``elapsed_s`` after the last tick."""
    counted_s = min(elapsed_s, 2 * config.tick_s)
    has_work = view.status is not None and view.status.num_running + view.status.num_waiting > 0
    return replace(
        view,
        silent_s=view.silent_s + counted_s,
        stepless_s=view.stepless_s + counted_s if has_work else 0.0,
    )


def find_fault(view: Liveness, config: LivenessConfig) -> str | None:
    """Gives why the worker counts as hung, or None while it does not."""
    if view.status is None:
        return f"no sign of life {view.silent_s:.1f} s after its start" if view.silent_s > config.start_s else None
    if view.status.state is WorkerState.LOADING:
        return f"silent for {view.silent_s:.1f} s while loading" if view.silent_s > config.loading_silent_s else None
    limit_s = max(config.silent_s, config.step_factor * view.status.predicted_step_s)
    if view.silent_s > limit_s:
        return f"silent for {view.silent_s:.1f} s"
    if view.stepless_s > limit_s:
        return f"no step for {view.stepless_s:.1f} s while work is waiting"
    return None
