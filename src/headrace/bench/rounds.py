"""Runs two servers in turns, so that both meet the same machine and the same requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import msgspec

from headrace.base.errors import ConfigError
from headrace.bench.compare import Round, round_of
from headrace.bench.records import Run, Settings
from headrace.bench.sample import Sample

Measure = Callable[[Settings, list[Sample]], Run]
"""Sends these samples and gives the run; blocks."""
Tell = Callable[[int, str], None]
"""Called with the number of rounds that both sides have behind them, and whose turn it is."""


def run_rounds(
    settings: tuple[Settings, Settings],
    samples: Iterator[Sample],
    measure: Measure,
    *,
    rounds: int,
    requests: int,
    tell: Tell = lambda done, name: None,
) -> tuple[list[Round], list[Round], bool]:
    """Measures two servers round by round, in the order A B, B A, A B, …; a drift of the machine meets both alike.

    A first round that warms both up is thrown away.

    Args:
        settings: of A and B; how many requests to send is set here.
        samples: each round takes ``requests`` of them and sends them to both.

    Returns:
        The rounds of A and B, equally many, and whether Ctrl-C ended it early.

    Raises:
        ConfigError: the samples end before the first round is full.
    """
    sides: tuple[list[Round], list[Round]] = ([], [])
    for number in range(-1, rounds):
        batch = list(islice(samples, requests))
        if len(batch) < requests:
            if number < 1:
                raise ConfigError(f"a round takes {requests} requests and the data has {len(batch)}: repeat it")
            break
        pair: dict[int, Round] = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            tell(max(number, 0), "AB"[side])
            wanted = msgspec.structs.replace(
                settings[side],
                num_requests=requests,
                duration_s=None,
                warmup_requests=0,
                warmup_s=0.0,
                seed=settings[side].seed + number + 1,
            )
            run = measure(wanted, batch)
            if run.is_partial:
                return *sides, True
            pair[side] = round_of(run.exchanges)
        if number >= 0:
            for side in (0, 1):
                sides[side].append(pair[side])
    return *sides, False
