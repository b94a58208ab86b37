"""How long the next step may take, from those that were."""

from __future__ import annotations

import pytest

from headrace.engine.pace import Pace


def test_nothing_is_predicted_before_a_step_was_seen() -> None:
    pace = Pace(512)

    assert (pace.predicted_step_s, pace.prefill_tokens_per_s) == (0.0, 0.0)


def test_prediction_is_for_the_fullest_step() -> None:
    pace = Pace(512)

    pace.observe(128, 0.1)
    pace.observe(1, 0.003)

    assert pace.predicted_step_s == pytest.approx(0.4)
    assert pace.prefill_tokens_per_s == pytest.approx(1280.0)


def test_prediction_follows_a_machine_that_became_slow() -> None:
    pace = Pace(512)
    pace.observe(1, 0.003)

    for _ in range(60):
        pace.observe(1, 0.03)

    assert pace.predicted_step_s == pytest.approx(0.03, rel=0.01)
