"""The thread policy on machines whose speed is a function of the threads used and of how many cores are taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.policy.threads import ThreadPolicy


def run(
    policy: ThreadPolicy, steps: int, step_s: Callable[[int, int], float], rows: int = 1
) -> tuple[float, list[int]]:
    """Returns the seconds of ``steps`` steps and the threads that each used; ``step_s(threads, index)``."""
    total, used = 0.0, []
    for index in range(steps):
        threads = policy.choose(rows)
        seconds = step_s(threads, index)
        policy.observe(rows, threads, seconds)
        total += seconds
        used.append(threads)
    return total, used


def quiet(threads: int, index: int) -> float:
    return 0.01 / threads * (1 + 0.2 * (index % 7 == 3))


def busy(threads: int, index: int) -> float:
    """Two cores and one neighbour: two threads take three times as long, one has a core of its own."""
    return {1: 0.011, 2: 0.015}[threads]


def test_a_quiet_machine_always_uses_all_threads() -> None:
    policy = ThreadPolicy(2)
    _, used = run(policy, 2000, quiet)
    assert set(used) == {2}


def test_a_busy_neighbour_brings_one_thread_and_its_end_brings_two() -> None:
    policy = ThreadPolicy(2)
    run(policy, 100, quiet)
    _, used = run(policy, 400, busy)
    assert used[50:].count(1) > 0.9 * len(used[50:])
    _, after = run(policy, 400, quiet)
    assert set(after[250:]) == {2}


def test_trials_cost_little_while_a_neighbour_stays() -> None:
    policy = ThreadPolicy(2)
    run(policy, 100, quiet)
    seconds, _ = run(policy, 4000, busy)
    assert seconds < 1.03 * 4000 * busy(1, 0)


def test_a_slow_machine_where_fewer_threads_do_not_help_keeps_all() -> None:
    policy = ThreadPolicy(2)
    run(policy, 100, quiet)
    # The memory became slow for everyone: one thread is slower still.
    seconds, used = run(policy, 4000, lambda threads, index: {1: 0.03, 2: 0.015}[threads])
    assert used.count(2) > 0.97 * len(used)
    assert seconds < 1.03 * 4000 * 0.015


def test_steps_of_other_sizes_are_judged_apart() -> None:
    policy = ThreadPolicy(2)
    run(policy, 100, quiet)
    run(policy, 100, lambda threads, index: 64 * quiet(threads, index) * 5, rows=64)
    assert policy.choose(1) == 2
    run(policy, 100, busy)
    assert (policy.choose(1), policy.choose(64)) == (1, 2)


@pytest.mark.parametrize("threads", [1, 3, 8, 64])
def test_the_number_stays_within_what_there_is(threads: int) -> None:
    policy = ThreadPolicy(threads)
    _, used = run(policy, 3000, lambda count, index: 0.01 if index < 50 else 0.01 * count)
    assert min(used) >= 1
    assert max(used) <= threads
    if threads > 1:
        assert used[-1] < threads


def test_many_cores_give_up_only_what_is_taken() -> None:
    """Eight cores, two of them taken: six threads are the best number, reached within a stride."""
    policy = ThreadPolicy(8)
    run(policy, 100, lambda threads, index: 0.08 / threads)
    _, used = run(policy, 2000, lambda threads, index: 0.08 / threads * (3 if threads > 6 else 1))
    assert used[-1] in (5, 6, 7)
    assert used.count(6) + used.count(5) > 0.8 * len(used)
