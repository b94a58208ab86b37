"""Whose turn it is on threads that several models share."""

from __future__ import annotations

import random

import pytest

from headrace.policy.turns import Slot, TurnConfig, advanced, decide, respected_until_s

CONFIG = TurnConfig()
NOW_S = 100.0


def waiting(clock_s: float, since_s: float = 0.01) -> Slot:
    return Slot(clock_s, waiting_at_s=NOW_S - since_s)


def holding(clock_s: float, since_s: float = 0.01, step_s: float = 0.0) -> Slot:
    return Slot(clock_s, holding_until_s=respected_until_s(CONFIG, NOW_S - since_s, step_s))


@pytest.mark.parametrize(
    ("slots", "may_go", "first"),
    [
        pytest.param([waiting(5), Slot(0)], True, 0, id="others are idle"),
        pytest.param([waiting(5), holding(0)], False, None, id="another runs"),
        pytest.param([waiting(5), holding(0, 1.5)], True, 0, id="another runs for too long"),
        pytest.param([waiting(5), holding(0, 1.5, 0.5)], False, None, id="another runs a long step"),
        pytest.param([waiting(5), holding(0, 2.5, 0.5)], True, 0, id="another runs a long step for too long"),
        pytest.param([waiting(5), holding(0, 3.5, 9.0)], True, 0, id="another runs longer than anybody may"),
        pytest.param([waiting(5), waiting(4.9)], False, 1, id="another is further back"),
        pytest.param([waiting(4.9), waiting(5)], True, 0, id="it is further back itself"),
        pytest.param([waiting(5), waiting(5)], True, 0, id="equal: the first"),
        pytest.param([waiting(5), waiting(4.9, 0.3)], True, 0, id="another waits but does not look"),
        pytest.param([holding(5), waiting(4.9965)], True, 0, id="it holds the turn, within its quantum"),
        pytest.param([holding(5), waiting(4.9955)], False, 1, id="it holds the turn, past its quantum"),
        pytest.param([waiting(5), waiting(4.5), waiting(4.2)], False, 2, id="of several the furthest back"),
    ],
)
def test_the_worker_goes_whose_clock_is_furthest_back(slots: list[Slot], may_go: bool, first: int | None) -> None:
    decision = decide(slots, 0, CONFIG, NOW_S)

    assert (decision.may_go, decision.first) == (may_go, first)
    assert decision.reason


def run(shares: list[float], steps_s: list[float], busy: list[tuple[float, float]], total_s: float) -> list[float]:
    """Plays workers that want steps of given lengths while they are busy; gives the time that each one got.

    Args:
        busy: from when to when each wants to step.
    """
    choose = random.Random(1)
    clocks, got = [0.0] * len(shares), [0.0] * len(shares)
    now_s, floor_s, was_waiting = 0.0, 0.0, [False] * len(shares)
    while now_s < total_s:
        wants = [start <= now_s < stop for start, stop in busy]
        for index, wants_it in enumerate(wants):
            if wants_it and not was_waiting[index]:
                clocks[index] = max(clocks[index], floor_s)
        was_waiting = wants
        slots = [Slot(clock, now_s + 1.0 if w else 0.0) for clock, w in zip(clocks, wants, strict=True)]
        going = [i for i, w in enumerate(wants) if w and decide(slots, i, CONFIG, now_s + 1.0).may_go]
        if not going:
            assert not any(wants), "somebody wants the threads and nobody may have them"
            now_s += 0.001
            continue
        (index,) = going  # never two
        step_s = steps_s[index] * choose.uniform(0.5, 1.5)
        floor_s = clocks[index]
        clocks[index] = advanced(clocks[index], step_s, shares[index])
        got[index] += step_s
        now_s += step_s
    return got


@pytest.mark.parametrize(
    ("shares", "steps_s"),
    [
        ([1, 1], [0.002, 0.002]),
        ([1, 1], [0.001, 0.3]),
        ([3, 1], [0.002, 0.05]),
        ([1, 5], [0.05, 0.002]),
        ([1, 2, 4], [0.01, 0.002, 0.03]),
    ],
)
def test_busy_models_get_their_shares_whatever_the_length_of_their_steps(
    shares: list[float], steps_s: list[float]
) -> None:
    got = run(shares, steps_s, [(0.0, 60.0)] * len(shares), 60.0)

    for part, share in zip(got, shares, strict=True):
        assert part / sum(got) == pytest.approx(share / sum(shares), abs=0.02)


def test_idleness_earns_no_credit_and_costs_none() -> None:
    got = run([1, 1], [0.002, 0.002], [(0.0, 20.0), (10.0, 20.0)], 20.0)

    assert got == pytest.approx([15.0, 5.0], abs=0.1)  # alone for 10 s, then half each
