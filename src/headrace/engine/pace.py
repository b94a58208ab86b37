"""How fast steps have been lately, and hence how long the next one may take."""

from __future__ import annotations

# Weight of the newest step. A tenth forgets a start-up hiccup in about 20 steps and follows a busy machine.
_NEW_SHARE = 0.1
# Steps with at least this many rows say what a row costs; smaller ones are bound by reading the weights.
_PREFILL_ROWS = 64


class Pace:
    """Moving averages of step times. ``predicted_step_s`` is for the fullest step that may come next."""

    def __init__(self, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._step_s = 0.0
        self._row_s = 0.0

    def observe(self, num_rows: int, step_s: float) -> None:
        """Takes one step's measure."""
        if num_rows >= _PREFILL_ROWS:
            self._row_s = _mix(self._row_s, step_s / num_rows)
        else:
            self._step_s = _mix(self._step_s, step_s)

    @property
    def predicted_step_s(self) -> float:
        """Seconds that a step full of rows would take; 0 before anything was measured."""
        return max(self._step_s, self._row_s * self._max_step_tokens)

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step of few rows; 0 before one was measured."""
        return self._step_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rows per second of prefill steps; 0 before one was measured."""
        return 1.0 / self._row_s if self._row_s > 0.0 else 0.0


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)
