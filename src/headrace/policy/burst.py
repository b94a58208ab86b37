"""How many decode steps to run in a row before anybody hears of their tokens.

Planning, bookkeeping and sending cost the same for one step as for several, a fifth of a step of a small model. But
tokens of a burst come out together: a stream that gets its tokens late, and in lumps, is worse than one that is a
little slower. A new request ends a burst at the next step, so nobody waits for one to be let in.

Pure: the time of a step in, a number out.
"""

from __future__ import annotations

# Tokens leave at least this often: fifty times a second is more than a reader, a voice or a terminal tells apart.
LONGEST_BURST_S = 0.020
# What a burst saves falls with its length: the eighth step brings 2 % of what planning costs.
MAX_STEPS = 8


def burst_steps(step_s: float) -> int:
    """Returns how many decode steps may run in a row, 1 to ``MAX_STEPS``.

    Args:
        step_s: what a decode step takes; 0 while nothing is known.
    """
    if step_s <= 0.0:
        return 1
    return max(1, min(MAX_STEPS, int(LONGEST_BURST_S / step_s)))
