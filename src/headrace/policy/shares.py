"""How models on one machine share what is there of something: each gets its least, and of the rest its weighted part.

What one model cannot use goes to the others (water-filling), so nothing lies idle while somebody wants it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wish:
    """What one model wants, in any unit.

    Args:
        least: without this it cannot run.
        most: more than this it cannot use, ≥ ``least``.
        share: weight of its part, > 0.
    """

    least: int
    most: int
    share: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What each gets, in the order of the wishes; None where the least of all is more than there is."""

    parts: tuple[int, ...] | None
    reason: str


def decide(wishes: Sequence[Wish], available: int) -> Decision:
    """Shares ``available`` out. Cost: O(n²) for n wishes."""
    least = sum(wish.least for wish in wishes)
    if least > available:
        return Decision(None, f"{least} are needed at least, {available} are there")
    parts = [wish.least for wish in wishes]
    left = available - least
    open_ = [index for index, wish in enumerate(wishes) if wish.most > wish.least]
    while open_ and left > 0:
        total = sum(wishes[index].share for index in open_)
        filled = [index for index in open_ if wishes[index].most - parts[index] <= left * wishes[index].share / total]
        if not filled:
            for index in open_:
                parts[index] += int(left * wishes[index].share / total)
            break
        for index in filled:
            left -= wishes[index].most - parts[index]
            parts[index] = wishes[index].most
            open_.remove(index)
    return Decision(tuple(parts), f"{available - sum(parts)} are left over")
