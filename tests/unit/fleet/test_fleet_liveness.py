from headrace.fleet.liveness import Liveness, LivenessConfig, find_fault, hear, tick
from headrace.protocol.frames import Status, WorkerState

CONFIG = LivenessConfig(tick_s=0.5, silent_s=10.0, step_factor=5.0, loading_silent_s=60.0, start_s=120.0)


def beat(
    num_steps: int, *, num_running: int = 0, state: WorkerState = WorkerState.READY, step_s: float = 0.01
) -> Status:
    return Status(state, num_steps, num_running, 0, 10, 0, 10, step_s)


def pass_time(view: Liveness, duration_s: float) -> Liveness:
    for _ in range(int(duration_s / CONFIG.tick_s)):
        view = tick(view, CONFIG.tick_s, CONFIG)
    return view


def test_worker_that_beats_without_work_is_alive_for_ever() -> None:
    view = hear(Liveness(), beat(7))

    for _ in range(100):
        view = hear(pass_time(view, 5), beat(7))

    assert find_fault(view, CONFIG) is None


def test_worker_that_says_nothing_for_ten_seconds_is_hung() -> None:
    view = hear(Liveness(), beat(7))

    assert find_fault(pass_time(view, 10), CONFIG) is None
    assert find_fault(pass_time(view, 10.5), CONFIG) == "silent for 10.5 s"


def test_worker_that_beats_but_makes_no_step_with_work_waiting_is_hung() -> None:
    view = hear(Liveness(), beat(7, num_running=1))

    for _ in range(11):
        view = hear(pass_time(view, 1), beat(7, num_running=1))

    assert find_fault(view, CONFIG) == "no step for 11.0 s while work is waiting"


def test_saturated_worker_that_steps_slowly_is_alive() -> None:
    view = hear(Liveness(), beat(0, num_running=32))

    for step in range(100):
        view = hear(pass_time(view, 9), beat(step, num_running=32))

        assert find_fault(view, CONFIG) is None


def test_limit_grows_with_the_predicted_step() -> None:
    view = pass_time(hear(Liveness(), beat(7, step_s=4.0)), 19.5)

    assert find_fault(view, CONFIG) is None
    assert find_fault(pass_time(view, 1), CONFIG) is not None


def test_idle_time_does_not_count_once_work_arrives() -> None:
    view = hear(Liveness(), beat(7))
    for _ in range(60):
        view = hear(pass_time(view, 1), beat(7))

    view = hear(view, beat(7, num_running=1))

    assert find_fault(pass_time(view, 9), CONFIG) is None


def test_loading_worker_has_its_own_limit() -> None:
    view = hear(Liveness(), beat(0, state=WorkerState.LOADING))

    assert find_fault(pass_time(view, 59), CONFIG) is None
    assert find_fault(pass_time(view, 61), CONFIG) is not None


def test_worker_that_never_speaks_is_hung_after_the_start_limit() -> None:
    assert find_fault(pass_time(Liveness(), 119), CONFIG) is None
    assert find_fault(pass_time(Liveness(), 121), CONFIG) is not None


def test_suspended_supervisor_blames_nobody_for_the_time_it_slept() -> None:
    view = hear(Liveness(), beat(7, num_running=1))

    view = tick(view, 3600.0, CONFIG)

    assert find_fault(view, CONFIG) is None
