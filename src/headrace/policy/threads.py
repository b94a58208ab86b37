"""How many threads the next step uses: all of them, or fewer while other processes keep some cores busy.

A step has its columns shared out beforehand, so it is as slow as the thread that got least of its core: with one busy
neighbour on two cores it takes three times as long, and one thread alone would be faster. Nobody tells a process how
busy its cores are, so this measures: where steps have become much slower than they were, it tries fewer threads for a
few steps, and while it runs on fewer it tries more from time to time. The results do not depend on the number (the
determinism contract), so trying is free of any other effect.

Pure: times in, a number out. Steps of unlike size are kept apart by the power of two of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Weight of the newest step in a mean: half of it is the last three steps.
_NEW_SHARE = 0.2
# Steps count as slow from here on; quiet machines stay below, and it is well under what one busy neighbour does (3).
_SLOW_RATIO = 1.6
# The best time drifts up by this share a step: contexts grow, and a memory mode may change for good.
_BEST_DRIFT = 0.002
# A change must gain this much, or two equal choices would alternate.
_GAIN = 0.9
_TRIAL_STEPS = 4
# Steps between trials: doubles with every one that gained nothing.
_FIRST_PAUSE, _LONGEST_PAUSE = 12, 192


@dataclass(slots=True)
class _Size:
    """What is known of steps of one size. Times are seconds per row."""

    count: int
    best_s: float = float("inf")
    means_s: dict[int, float] = field(default_factory=dict)
    trial: int = 0  # threads being tried, 0 for none
    num_steps: int = 0  # of the trial, or since the last one
    pause: int = _FIRST_PAUSE


class ThreadPolicy:
    """Chooses the number of threads of each step.

    Args:
        threads: how many there are.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._sizes: dict[int, _Size] = {}

    def choose(self, num_rows: int) -> int:
        """Returns the threads for a step of ``num_rows`` rows, 1 to all."""
        size = self._sizes.get(num_rows.bit_length())
        return self._threads if size is None else size.trial or size.count

    def observe(self, num_rows: int, threads: int, step_s: float) -> None:
        """Takes the time of a step that ran on as many threads as ``choose`` said."""
        if self._threads == 1:
            return
        size = self._sizes.setdefault(num_rows.bit_length(), _Size(self._threads))
        row_s = step_s / num_rows
        is_first = size.trial == threads and size.num_steps == 0
        mean_s = row_s if is_first else size.means_s.get(threads, row_s)
        size.means_s[threads] = mean_s + _NEW_SHARE * (row_s - mean_s)
        size.best_s = min(size.best_s * (1 + _BEST_DRIFT), row_s)
        size.num_steps += 1
        if size.trial:
            if size.num_steps >= _TRIAL_STEPS:
                self._judge(size)
        elif size.num_steps >= size.pause:
            self._consider(size)

    def _judge(self, size: _Size) -> None:
        """Ends a trial: the better number stays."""
        if size.means_s[size.trial] < _GAIN * size.means_s[size.count]:
            size.count, size.pause = size.trial, _FIRST_PAUSE
        else:
            size.pause = min(2 * size.pause, _LONGEST_PAUSE)
        size.trial = size.num_steps = 0

    def _consider(self, size: _Size) -> None:
        """Starts a trial where one may gain: fewer threads when steps are slow, more when some are idle."""
        stride = max(1, size.count // 4)
        if size.count < self._threads:
            size.trial = min(self._threads, size.count + stride)
        elif size.means_s[size.count] > _SLOW_RATIO * size.best_s:
            size.trial = size.count - stride
        else:
            size.pause = _FIRST_PAUSE
        size.num_steps = 0 if size.trial else size.num_steps
