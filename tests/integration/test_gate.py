"""Real processes before a real gate: shares, and neighbours that die or stop in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import msgspec
import pytest

from headrace.base.clock import SystemClock
from headrace.engine.gate import Gate
from headrace.fleet.gate import open_gate
from headrace.protocol.launch import GateLaunch

# Steps are pauses, so that a busy machine changes nothing: a step takes its time, and nobody else's.
WORKER = """
import json, select, sys, time
import msgspec
from headrace.base.clock import SystemClock
from headrace.engine.gate import Gate
from headrace.protocol.launch import GateLaunch
launch = msgspec.json.decode(sys.argv[1], type=GateLaunch)
gate, step_s, total_s = Gate(launch, SystemClock()), float(sys.argv[2]), float(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
got_s, longest_wait_s, steps = 0.0, 0.0, []
stop_s = time.monotonic() + total_s
waited_since_s = time.monotonic()
poll = select.poll()
poll.register(gate.wake_fd, select.POLLIN)
while time.monotonic() < stop_s:
    if not gate.enter():
        if poll.poll(50):
            import os
            os.eventfd_read(gate.wake_fd)
        continue
    start_s = time.monotonic()
    longest_wait_s = max(longest_wait_s, start_s - waited_since_s)
    time.sleep(step_s)
    waited_since_s = time.monotonic()
    steps.append((start_s, waited_since_s))
    got_s += waited_since_s - start_s
    gate.leave()
gate.close()
print(json.dumps({"got_s": got_s, "longest_wait_s": longest_wait_s, "steps": steps}), flush=True)
"""


class Workers:
    """Workers at one gate."""

    def __init__(self, places: list[GateLaunch | None], steps_s: list[float], total_s: float) -> None:
        self.children = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, msgspec.json.encode(place).decode(), str(step_s), str(total_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(place.memory_fd, *place.wake_fds),
                text=True,
            )
            for place, step_s in zip(places, steps_s, strict=True)
            if place is not None
        ]
        for child in self.children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"

    def start(self) -> None:
        for child in self.children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

    def result(self, index: int) -> dict[str, object]:
        said: dict[str, object] = json.loads(self.children[index].communicate(timeout=60)[0])
        return said


@contextmanager
def workers(shares: list[float], steps_s: list[float], total_s: float) -> Iterator[Workers]:
    with ExitStack() as held:
        places = open_gate([2] * len(shares), shares, 2, held)
        found = Workers(places, steps_s, total_s)
        try:
            yield found
        finally:
            for child in found.children:
                child.kill()
                child.wait()
                for stream in (child.stdin, child.stdout):
                    if stream is not None:
                        stream.close()


def test_each_gets_its_share_and_no_two_steps_overlap() -> None:
    with workers([3, 1], [0.002, 0.01], 2.0) as found:
        found.start()
        results = [found.result(index) for index in range(2)]

    first, second = (float(str(result["got_s"])) for result in results)
    assert first / (first + second) == pytest.approx(0.75, abs=0.08)
    steps = sorted((start, stop) for result in results for start, stop in result["steps"])  # type: ignore[attr-defined]
    overlaps = sum(later[0] < earlier[1] - 1e-3 for earlier, later in pairwise(steps))
    assert overlaps <= 0.02 * len(steps)  # a process that was kept from the lock for 10 ms goes without
    assert len(steps) > 100


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_neighbour_that_ends_or_stops_in_its_step_holds_nobody_up(fault: signal.Signals) -> None:
    with workers([1, 1], [0.002, 0.4], 3.0) as found:
        found.start()
        time.sleep(0.7)
        os.kill(found.children[1].pid, fault)  # most likely in its step, which is nearly all that it does
        if fault is signal.SIGKILL:
            found.children[1].wait()  # as the supervisor does
        result = found.result(0)

    assert float(str(result["longest_wait_s"])) < 1.6  # patience is 1 s, a step 0.4 s
    last = result["steps"][-1][1] - result["steps"][0][0]  # type: ignore[index]
    assert last > 2.5  # and it went on to the end


def test_the_time_of_a_step_with_its_waits_follows_the_share() -> None:
    with ExitStack() as held:
        slowdowns = [
            Gate(place, SystemClock()).slowdown for place in open_gate([2, 2], [3, 1], 2, held) if place is not None
        ]

    assert slowdowns == pytest.approx([4 / 3, 4])


def test_a_machine_with_cores_for_all_needs_no_gate() -> None:
    with ExitStack() as held:
        assert open_gate([1, 1], [1, 1], 2, held) == [None, None]
        assert open_gate([2], [1], 2, held) == [None]
