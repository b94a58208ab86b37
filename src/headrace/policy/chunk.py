"""How many rows of prompts may ride along with decode rows, so that streams keep flowing while prompts are read.

Decode rows wait for the prompt rows of their step: 512 of them hold every stream up for half a second on two old cores.
Fewer rows a step keep streams smooth and make the newcomer wait longer. Each sequence counts alike: prompts get that
share of a step's time which they are of all sequences, and at least ``least_share``, so that one prompt among many
streams slows them to 1 / (1 − least_share) of their step and is itself read at least_share of the speed it has alone.

What a step of decode rows takes and what a prompt's row adds is measured as steps go by: a row far into a long prompt
costs three times what its first rows cost. The rows of a step never show in the results (the determinism contract).
Pure: times in, a number out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """What to weigh.

    Args:
        least_share: of a step's time, in (0, 1). With 0.45 one long prompt among 16 streams lets their gaps grow to
            1.82 of what they were and takes 2.2 times as long, of limits of 2 and 3: both leave room for what the few
            rows of a step cost more than many.
        least_rows: of a step, however long it takes: fewer hardly share what reading their context costs
            (docs/lab/0007).
        new_share: weight of the newest step in a mean.
    """

    least_share: float = 0.45
    least_rows: int = 4
    new_share: float = 0.2


@dataclass(frozen=True, slots=True)
class ChunkView:
    """Who wants rows of the next step.

    Args:
        num_decoding: sequences with a decode row in it.
        num_prompts: sequences that wait for theirs, in the queue or half read.
    """

    num_decoding: int
    num_prompts: int


@dataclass(frozen=True, slots=True)
class ChunkState:
    """What the steps so far have shown.

    Args:
        decode_s: time of a step of decode rows alone, by bit length of their number.
        row_s: what a prompt's row adds to a step; 0 while nothing is known.
    """

    decode_s: dict[int, float] = field(default_factory=dict)
    row_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkDecision:
    """How many rows of prompts the next step may have; None where nothing limits them."""

    rows: int | None
    reason: str


def decide(view: ChunkView, state: ChunkState, config: ChunkConfig, now_s: float) -> tuple[ChunkState, ChunkDecision]:
    """Decides the prompt rows of one step. ``now_s`` belongs to the shape of every policy; this one has no clock."""
    decode_s = _known_decode_s(state, view.num_decoding)
    if view.num_decoding == 0:
        return state, ChunkDecision(None, "nobody decodes")
    if decode_s == 0.0 or state.row_s <= 0.0:
        return state, ChunkDecision(None, "nothing is known yet")
    share = max(config.least_share, view.num_prompts / (view.num_prompts + view.num_decoding))
    rows = int(decode_s * share / (1.0 - share) / state.row_s)
    if rows < config.least_rows:
        return state, ChunkDecision(config.least_rows, f"{config.least_rows} rows at least")
    return state, ChunkDecision(rows, f"{rows} rows take {share:.0%} of the step")


def observe(num_decoding: int, num_rows: int, step_s: float, state: ChunkState, config: ChunkConfig) -> ChunkState:
    """Returns the state after a step of ``num_rows`` rows, ``num_decoding`` of them decode rows, and ``step_s``."""
    if num_rows == num_decoding:
        size = num_decoding.bit_length()
        mean_s = _mix(state.decode_s.get(size, 0.0), step_s, config)
        return replace(state, decode_s=state.decode_s | {size: mean_s})
    if num_rows - num_decoding < config.least_rows:  # the last few rows of a prompt say nothing
        return state
    added_s = max(0.0, step_s - _known_decode_s(state, num_decoding))
    return replace(state, row_s=_mix(state.row_s, added_s / (num_rows - num_decoding), config))


def _known_decode_s(state: ChunkState, num_decoding: int) -> float:
    """Returns the time of a step of as many decode rows, or of the most below that are known; 0 for none."""
    sizes = [size for size in state.decode_s if size <= num_decoding.bit_length()]
    return state.decode_s[max(sizes)] if sizes and num_decoding else 0.0


def _mix(old: float, new: float, config: ChunkConfig) -> float:
    return new if old == 0.0 else old + config.new_share * (new - old)
