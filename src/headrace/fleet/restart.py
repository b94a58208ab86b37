"""When a dead child is started again: pauses of 1, 2, 4 … 60 s, and ``crash_loop`` after five deaths in ten minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartConfig:
    """Limits.

    Args:
        first_pause_s: pause after the first death in the window; each further one doubles it.
        longest_pause_s: the most it grows to.
        window_s: how long a death counts.
        num_loop_deaths: deaths in the window that make a crash loop.
    """

    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    window_s: float = 600.0
    num_loop_deaths: int = 5


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do after a death.

    Args:
        pause_s: seconds until the next start.
        is_crash_loop: whether the child dies too often; it is then tried at the longest pause.
        reason: why.
    """

    pause_s: float
    is_crash_loop: bool
    reason: str


def decide(deaths_at_s: tuple[float, ...], config: RestartConfig, now_s: float) -> tuple[tuple[float, ...], Decision]:
    """Counts a death at ``now_s`` and gives the deaths that still count, and the decision."""
    recent = (*(at_s for at_s in deaths_at_s if now_s - at_s < config.window_s), now_s)
    if len(recent) >= config.num_loop_deaths:
        reason = f"{len(recent)} deaths in {config.window_s:.0f} s"
        return recent, Decision(config.longest_pause_s, True, reason)
    pause_s = min(config.longest_pause_s, config.first_pause_s * 2.0 ** (len(recent) - 1))
    return recent, Decision(pause_s, False, f"death {len(recent)} in {config.window_s:.0f} s")
