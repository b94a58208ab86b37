"""A VM that computes nothing but is strict: its next token depends on every token read back through the block tables.

It keeps a KV pool of token ids instead of vectors. A wrong block table, position, shared block or stale page changes
its answers, so bookkeeping is tested bit for bit without a model. It has the shape of ``engine.executor.StepVm``.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from headrace.program.opcodes import BLOCK_TOKENS
from headrace.program.records import RESULT_DTYPE


def next_token(tokens: npt.NDArray[np.int32], seed: int, vocab_size: int, banned: frozenset[int]) -> int:
    """Returns the token that follows ``tokens``: a hash of all of them and the seed, never a banned one."""
    for attempt in range(64):
        digest = blake2b(tokens.tobytes(), digest_size=8, key=b"%d,%d" % (seed, attempt)).digest()
        token = int.from_bytes(digest, "little") % vocab_size
        if token not in banned:
            return token
    return next(token for token in range(vocab_size) if token not in banned)


class FakeVm:
    """Deterministic stand-in for ``kernels.vm.Vm``.

    Args:
        num_blocks: blocks of the pool.
        vocab_size: tokens are below it.
        nan_after: a sequence that contains this token answers "not a number"; None never does.
        window: last tokens that the answer depends on, 0 for all. Pages wholly before them are not read.
    """

    def __init__(
        self, num_blocks: int, vocab_size: int, *, nan_after: int | None = None, max_top: int = 8, window: int = 0
    ) -> None:
        self.num_steps = 0
        self.num_threads = 0
        self._vocab_size = vocab_size
        self._nan_after = nan_after
        self._max_top = max_top
        self._window = window
        self._pages = np.full((num_blocks, BLOCK_TOKENS), -1, np.int32)

    def use_threads(self, count: int) -> None:
        """Notes the number."""
        self.num_threads = count

    def step(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        seq_starts: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        outputs: npt.NDArray[np.void],
        *,
        count_ids: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        bias_ids: npt.NDArray[np.int32],
        bias_values: npt.NDArray[np.float32],
        masks: npt.NDArray[np.uint32],
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Runs one step, checking what the real VM checks."""
        self.num_steps += 1
        assert seq_starts[0] == 0
        assert seq_starts[-1] == len(tokens) == len(positions)
        assert np.all((tokens >= 0) & (tokens < self._vocab_size))
        row_sequences = np.repeat(np.arange(len(seq_starts) - 1), np.diff(seq_starts))
        blocks = block_tables[row_sequences, positions // BLOCK_TOKENS]
        self._pages[blocks, positions % BLOCK_TOKENS] = tokens
        results = np.zeros(len(outputs), RESULT_DTYPE)
        top_ids = np.zeros((len(outputs), self._max_top), np.int32)
        top_logprobs = np.zeros((len(outputs), self._max_top), np.float32)
        for index, output in enumerate(outputs):
            row = int(output["row"])
            count = int(positions[row]) + 1
            known = self._read(block_tables[row_sequences[row]], count)
            assert output["position"] == count
            banned = self._banned(output, bias_ids, bias_values)
            if output["mask"] >= 0:
                bits = np.unpackbits(masks[output["mask"]].view(np.uint8), bitorder="little")[: self._vocab_size]
                banned |= frozenset(np.flatnonzero(bits == 0).tolist())
            penalties = self._penalties(output, count_ids, counts)
            seed = int(output["seed"]) + penalties
            chosen = next_token(known, seed, self._vocab_size, banned)
            scored = int(output["target"])
            results[index]["token"] = chosen if scored < 0 else scored
            results[index]["status"] = self._nan_after is not None and self._nan_after in known
            results[index]["logprob"] = -1.0 / (1 + chosen)
            num_top = min(max(int(output["num_logprobs"]), 0), self._max_top)
            results[index]["num_top"] = num_top
            top_ids[index, :num_top] = (chosen + np.arange(num_top)) % self._vocab_size
            top_logprobs[index, :num_top] = -1.0 - np.arange(num_top)
        return results, top_ids, top_logprobs

    def decode(
        self,
        tokens: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        seq_starts: npt.NDArray[np.int32],
        block_tables: npt.NDArray[np.int32],
        outputs: npt.NDArray[np.void],
        *,
        num_steps: int,
        stop_ids: npt.NDArray[np.int32],
        stop_starts: npt.NDArray[np.int32],
        wake_fd: int,
    ) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Runs single steps in a row and ends where the real VM does, but that it never looks at ``wake_fd``."""
        count = len(tokens)
        assert len(outputs) == len(stop_starts) - 1 == count
        no_ids, no_values, no_masks = np.empty(0, np.int32), np.empty(0, np.float32), np.empty((0, 0), np.uint32)
        tokens, positions, outputs = tokens.copy(), positions.copy(), outputs.copy()
        made = []
        for _ in range(num_steps):
            step = self.step(
                tokens,
                positions,
                seq_starts,
                block_tables,
                outputs,
                count_ids=no_ids,
                counts=no_ids,
                bias_ids=no_ids,
                bias_values=no_values,
                masks=no_masks,
            )
            made.append(step)
            tokens[:] = step[0]["token"]
            positions += 1
            outputs["position"] += 1
            stops = [stop_ids[start:stop] for start, stop in pairwise(stop_starts)]
            if step[0]["status"].any() or any(token in ids for token, ids in zip(tokens, stops, strict=True)):
                break
        results, top_ids, top_logprobs = zip(*made, strict=True)
        return np.concatenate(results), np.concatenate(top_ids), np.concatenate(top_logprobs)

    def _read(self, table: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int32]:
        first = max(0, count - self._window) if self._window else 0
        first_block = first // BLOCK_TOKENS
        blocks = table[first_block : -(-count // BLOCK_TOKENS)]
        start = first_block * BLOCK_TOKENS
        known = self._pages[blocks].reshape(-1)[first - start : count - start]
        assert np.all(known >= 0), "a position was read before it was written"
        return known

    def _banned(
        self, output: np.void, bias_ids: npt.NDArray[np.int32], bias_values: npt.NDArray[np.float32]
    ) -> frozenset[int]:
        start, count = int(output["bias_start"]), int(output["bias_len"])
        ids, values = bias_ids[start : start + count], bias_values[start : start + count]
        assert len(ids) == count
        assert np.all(np.diff(ids) > 0)
        return frozenset(ids[values <= -100.0].tolist())

    def _penalties(self, output: np.void, count_ids: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> int:
        start, count = int(output["counts_start"]), int(output["counts_len"])
        ids = count_ids[start : start + count]
        assert len(ids) == count
        assert np.all(np.diff(ids) > 0)
        return int((ids.astype(np.int64) * counts[start : start + count]).sum())
