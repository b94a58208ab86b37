"""Made-up pairs of servers whose true difference is known: what the comparison is judged by.

A request's work (prompt and output length) is log-normal and the same for both servers, as they are sent the same
requests. Each answer has noise of its own. The machine drifts: from round to round by 5 %, remembered to 70 %, and the
two rounds of a pair differ by 2 % besides. These are at least what two real servers on one shared machine showed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from headrace.bench.compare import ROUND_REQUESTS, ROUNDS, Comparison, Round, compare_rounds
from headrace.bench.ranks import Floats

_CONCURRENCY: Final = 16


@dataclass(frozen=True, slots=True)
class World:
    """How unruly the world is: standard deviations of logarithms.

    Args:
        work: of what requests ask for.
        noise: of one answer's latency, with the same work.
        drift: of the machine from round to round.
        memory: share of the drift that stays from one round to the next.
        flicker: between the two rounds of a pair.
    """

    work: float = 0.5
    noise: float = 0.35
    drift: float = 0.05
    memory: float = 0.7
    flicker: float = 0.02


def compare_pair(
    seed: int,
    *,
    ratio: float,
    is_paired: bool = True,
    rounds: int = ROUNDS,
    requests: int = ROUND_REQUESTS,
    world: World | None = None,
) -> Comparison:
    """Compares two made-up servers of which B takes ``ratio`` times as long as A."""
    world = world or World()
    random = np.random.default_rng(seed)
    a, b = [], []
    drift = np.zeros(2)
    for _ in range(rounds):
        push = random.normal(0.0, world.drift * np.sqrt(1 - world.memory**2), 2)
        # Side by side both sides see one machine; at different times each has its own.
        drift = world.memory * drift + (push[0] if is_paired else push)
        work = random.lognormal(0.0, world.work, requests)
        others = work if is_paired else random.lognormal(0.0, world.work, requests)
        slowness = np.exp(drift + random.normal(0.0, world.flicker, 2)) * (1.0, ratio)
        a.append(_round(work, slowness[0], world, random))
        b.append(_round(others, slowness[1], world, random))
    return compare_rounds(a, b, is_paired=is_paired)


def _round(work: Floats, slowness: float, world: World, random: np.random.Generator) -> Round:
    noise = np.exp(random.normal(0.0, world.noise, (2, len(work))))
    tokens = np.maximum(2, np.round(60 * work))
    ttft = 0.2 * work * noise[0] * slowness
    tpot = 0.012 * noise[1] * slowness
    e2e = ttft + tpot * (tokens - 1)
    values = {
        "TTFT p50": np.median(ttft),
        "TTFT p95": np.quantile(ttft, 0.95),
        "TPOT p50": np.median(tpot),
        "E2E p50": np.median(e2e),
        "E2E p95": np.quantile(e2e, 0.95),
        "output tokens/s": tokens.sum() * _CONCURRENCY / e2e.sum(),
    }
    return Round({name: float(value) for name, value in values.items()}, len(work), 0)
