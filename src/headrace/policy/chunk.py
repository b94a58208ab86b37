"""How many rows of prompts may ride along with decode rows, so that streams keep flowing while prompts are read.

Decode rows wait for the prompt rows of their step: 512 of them hold every stream up for half a second on two old cores.
Fewer rows a step keep streams smooth and make the newcomer wait longer. Each sequence counts alike: prompts get that
share of a step's time which they are of all sequences, and at least ``LEAST_SHARE``, so that one prompt among many
streams slows them to 1 / (1 − LEAST_SHARE) of their step and is itself read at LEAST_SHARE of the speed it has alone.

What a step of decode rows takes and what a prompt's row adds is measured as steps go by. The rows of a step never show
in the results (the determinism contract). Pure: times in, a number out.
"""

from __future__ import annotations

# One long prompt among 16 streams: their gaps grow to 1.67 of what they were, the prompt takes 2.5 times as long.
LEAST_SHARE = 0.4
# Fewer rows cost more each: below a dozen the kernels do not unpack weights for them, and every chunk reads its whole
# context again.
LEAST_ROWS = 16
# Weight of the newest step in a mean.
_NEW_SHARE = 0.2


class ChunkPolicy:
    """Chooses the prompt rows of each step from the times of those before."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by bit length of the number of rows: a step of decode rows alone
        self._row_s = 0.0  # what a prompt's row adds to a step

    def limit(self, num_decoding: int, num_prompts: int) -> int | None:
        """Returns how many rows of prompts the next step may have; None where nothing limits them.

        Args:
            num_decoding: sequences with a decode row in it.
            num_prompts: sequences that wait for theirs, in the queue or half read.
        """
        decode_s = self._known_decode_s(num_decoding)
        if num_decoding == 0 or decode_s == 0.0 or self._row_s <= 0.0:
            return None
        share = max(LEAST_SHARE, num_prompts / (num_prompts + num_decoding))
        return max(LEAST_ROWS, int(decode_s * share / (1.0 - share) / self._row_s))

    def observe(self, num_decoding: int, num_rows: int, step_s: float) -> None:
        """Takes the time of a step.

        Args:
            num_decoding: its decode rows.
            num_rows: all of its rows.
        """
        if num_rows == num_decoding:
            size = num_decoding.bit_length()
            self._decode_s[size] = _mix(self._decode_s.get(size, 0.0), step_s)
        elif num_rows - num_decoding >= LEAST_ROWS:  # the last few rows of a prompt say nothing
            added_s = max(0.0, step_s - self._known_decode_s(num_decoding))
            self._row_s = _mix(self._row_s, added_s / (num_rows - num_decoding))

    def _known_decode_s(self, num_decoding: int) -> float:
        """Returns the time of a step of as many decode rows, or of the most below that are known; 0 for none."""
        sizes = [size for size in self._decode_s if size <= num_decoding.bit_length()]
        return self._decode_s[max(sizes)] if sizes and num_decoding else 0.0


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEW_SHARE * (new - old)
