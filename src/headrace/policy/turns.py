"""Which of several models steps next on threads that they share: weighted fair queueing over the time of turns.

Every step runs alone on all threads, because a step that is shared out beforehand is as slow as its slowest thread. A
worker has a virtual clock: the time that it held the turn, divided by its share. Of those that wait the one whose clock
is furthest back goes first (start-time fair queueing: Goyal, Vin, Cheng 1996); who comes back from idleness starts at
the clock of the one that went last, so idleness earns no credit. The turn is a courtesy between processes, never a lock
that anything depends on: whoever does not answer or holds it too long is passed over.

Pure: times in, a decision out. Where the slots lie and how workers wake each other is ``engine.gate``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnConfig:
    """Limits in seconds.

    Args:
        quantum_s: virtual time by which the holder may run ahead of the one that is furthest back: several short steps
            in a row cost fewer changes of hands (about 50 µs each), and 4 ms are short beside a token.
        patience_s: a step that is not over after this long, or after ``patience_steps`` of its kind, does not keep the
            others waiting any more.
        longest_patience_s: nor does any step after this long: fronts call a worker stalled that has work and makes no
            step for 4.5 s.
        absent_s: a waiting worker that has not looked for this long does not count; it looks every ``LOOK_S``.
    """

    quantum_s: float = 0.004
    patience_s: float = 1.0
    patience_steps: float = 4.0
    longest_patience_s: float = 3.0
    absent_s: float = 0.25


LOOK_S = 0.05
"""A worker that waits looks at least this often, so that a lost wake-up or a dead neighbour costs no more."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One worker as the others see it; moments on the clock that all share.

    Args:
        clock_s: its virtual time.
        waiting_at_s: when it last looked while it waited; 0 while it does not.
        holding_until_s: how long the others respect its present step; 0 while it does not hold the turn.
    """

    clock_s: float = 0.0
    waiting_at_s: float = 0.0
    holding_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a worker goes, and if not, who is before it (None while somebody runs)."""

    may_go: bool
    first: int | None
    reason: str


def decide(slots: Sequence[Slot], index: int, config: TurnConfig, now_s: float) -> Decision:
    """Says whether the worker ``index`` may step now. Cost: O(n) for n workers."""
    own = slots[index]
    for other, slot in enumerate(slots):
        if other != index and slot.holding_until_s > now_s:
            return Decision(False, None, f"{other} runs")
    ahead = own.clock_s - (config.quantum_s if own.holding_until_s else 0.0)
    first = index
    for other, slot in enumerate(slots):
        if other == index or not slot.waiting_at_s or now_s - slot.waiting_at_s > config.absent_s:
            continue
        if (slot.clock_s, other) < (ahead, first):
            ahead, first = slot.clock_s, other
    if first == index:
        return Decision(True, index, "nobody who waits is further back")
    return Decision(False, first, f"{first} is {own.clock_s - ahead:.4f} s further back")


def respected_until_s(config: TurnConfig, now_s: float, step_s: float) -> float:
    """Gives how long the others respect a step that begins now and is expected to take ``step_s``."""
    return now_s + min(config.longest_patience_s, max(config.patience_s, config.patience_steps * step_s))


def advanced(clock_s: float, held_s: float, share: float) -> float:
    """Gives a virtual clock after the turn was held."""
    return clock_s + held_s / share
