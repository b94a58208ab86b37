"""How many decode steps run in a row."""

import pytest

from headrace.policy.burst import LONGEST_BURST_S, MAX_STEPS, burst_steps


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(0.0, 1), (0.0001, MAX_STEPS), (0.0016, MAX_STEPS), (0.0055, 3), (0.0101, 1), (0.04, 1), (10.0, 1)],
)
def test_steps_in_a_row_fit_the_time(step_s: float, steps: int) -> None:
    assert burst_steps(step_s) == steps
    assert steps == 1 or steps * step_s <= LONGEST_BURST_S
