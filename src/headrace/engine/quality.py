"""How far a configuration's answers are from a reference: teacher-forced divergence, agreement and perplexity.

A text is fed as it stands, and after every token the model's distribution of the next one is compared with the
reference's. Each side gives its 256 most likely tokens; the rest of its mass is one remainder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.base.errors import ContextLengthError
from headrace.engine.weights import load_weights
from headrace.program.encode import encode
from headrace.program.opcodes import BLOCK_TOKENS, MAX_LOGPROBS, KvType
from headrace.program.records import OUTPUT_DTYPE
from headrace.program.spec import build_program, spec_from_files
from headrace.program.verify import verify, verify_encoded
from headrace.registry.model import open_model

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Distributions:
    """Next-token distributions at P positions.

    Args:
        ids: [P, T], most likely first.
        logprobs: [P, T], natural logarithms.
        targets: [P], log-probability of the token that follows in the text; None where it is not known.
    """

    ids: Int32s
    logprobs: NDArray[np.float64]
    targets: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class QualityReport:
    """A comparison over P positions.

    Args:
        top1_ratio: share of positions where both hold the same token most likely.
        kl_mean, kl_max: Kullback-Leibler divergence of the configuration from the reference, nats.
        perplexity: of the text under the configuration; ``reference_perplexity`` under the reference, NaN unknown.
    """

    positions: int
    top1_ratio: float
    kl_mean: float
    kl_max: float
    perplexity: float
    reference_perplexity: float


def divergences(reference: Distributions, candidate: Distributions) -> NDArray[np.float64]:
    """Returns KL(reference ‖ candidate) per position, [P] nats.

    Both distributions are taken over the same outcomes: the tokens that both list, and "any other". Joining outcomes
    can only lower the divergence; with 256 of them the remainder is what neither side thinks likely.
    """
    result = np.empty(len(reference.ids))
    for row, (ids, logprobs) in enumerate(zip(reference.ids, reference.logprobs, strict=True)):
        _, ours, theirs = np.intersect1d(ids, candidate.ids[row], assume_unique=True, return_indices=True)
        log_p, log_q = logprobs[ours], candidate.logprobs[row][theirs]
        p, q = np.exp(log_p), np.exp(log_q)
        # Rounding may leave a remainder of −1e−7; nothing below 1e−9 is meant.
        rest_p, rest_q = max(1.0 - p.sum(), 1e-9), max(1.0 - q.sum(), 1e-9)
        result[row] = (p * (log_p - log_q)).sum() + rest_p * np.log(rest_p / rest_q)
    return np.maximum(result, 0.0)


def compare(reference: Distributions, candidate: Distributions) -> QualityReport:
    """Returns how far ``candidate`` is from ``reference``."""
    kl = divergences(reference, candidate)
    return QualityReport(
        positions=len(kl),
        top1_ratio=float((reference.ids[:, 0] == candidate.ids[:, 0]).mean()),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        perplexity=_perplexity(candidate.targets),
        reference_perplexity=_perplexity(reference.targets),
    )


def _perplexity(targets: NDArray[np.float64] | None) -> float:
    return float("nan") if targets is None else float(np.exp(-targets.mean()))


class Subject:
    """A model in one configuration, loaded to be asked for distributions and greedy answers, one sequence at a time.

    Args:
        path: folder or file.
        dtype: ``fp32`` is the exact path: f32 weights, activations and KV.
        quantization: ``none``, ``int8``, ``int4``.
        context_tokens: longest sequence.
        rows: rows of a step; results do not depend on it.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "bf16",
        quantization: str = "none",
        isa: str | None = None,
        threads: int = 2,
        context_tokens: int = 512,
        rows: int = 128,
    ) -> None:
        # Late: what only compares must import where the native library is not built.
        from headrace.kernels.vm import KvConfig, Vm

        files = open_model(path, has_vocabulary=False)
        spec = spec_from_files(files)
        program = build_program(spec)
        verify(program)
        encoded = encode(program, rows)
        verify_encoded(program, encoded)
        self._rows = rows
        self._blocks = -(-context_tokens // BLOCK_TOKENS)
        self.vocab_size = spec.vocab_size
        self._vm = Vm(
            encoded.records,
            encoded.arena_bytes,
            load_weights(
                files,
                program,
                dtype=dtype,
                quantization=quantization,
                rope_positions=self._blocks * BLOCK_TOKENS,
                threads=threads,
            ),
            threads=threads,
            isa=isa,
            max_rows=rows,
            max_sequences=1,
            max_outputs=rows,
            max_top=MAX_LOGPROBS,
            kv=KvConfig(
                KvType.F32 if dtype == "fp32" else KvType.BF16,
                spec.layers,
                spec.kv_heads,
                spec.head_size,
                self._blocks,
            ),
        )

    def distributions(self, texts: Sequence[Sequence[int]]) -> Distributions:
        """Returns the distribution after every token of every text but its last, text after text.

        Raises:
            ContextLengthError: a text is longer than the context.
        """
        parts = [part for text in texts for part in self._score(text)]
        return Distributions(
            np.concatenate([ids for ids, _, _ in parts]),
            np.concatenate([logprobs for _, logprobs, _ in parts]),
            np.concatenate([targets for _, _, targets in parts]),
        )

    def _score(self, text: Sequence[int]) -> Iterator[tuple[Int32s, NDArray[np.float64], NDArray[np.float64]]]:
        for start in range(0, len(text) - 1, self._rows):
            stop = min(start + self._rows, len(text) - 1)
            outputs = self._outputs(range(start, stop), num_logprobs=min(MAX_LOGPROBS, self.vocab_size))
            outputs["target"] = text[start + 1 : stop + 1]
            results, ids, logprobs = self._step(text, start, stop, outputs)
            assert (results["status"] == 0).all(), "the model makes NaN of this text"
            width = int(results["num_top"][0])
            yield ids[:, :width], logprobs[:, :width].astype(np.float64), results["logprob"].astype(np.float64)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Returns the greedy continuation, end-of-sequence ids included.

        Raises:
            ContextLengthError: prompt and continuation are longer than the context.
        """
        ids = list(prompt)
        start = 0
        while len(ids) < len(prompt) + num_tokens:
            stop = min(start + self._rows, len(ids))
            outputs = self._outputs([stop - 1], num_logprobs=-1, start=start)
            results, _, _ = self._step(ids, start, stop, outputs)
            if stop == len(ids):
                ids.append(int(results["token"][0]))
            start = stop
        return ids[len(prompt) :]

    def _outputs(self, positions: Sequence[int], *, num_logprobs: int, start: int | None = None) -> NDArray[np.void]:
        """Returns greedy output rows for positions of a step that begins at ``start``, by default the first of them."""
        outputs = np.zeros(len(positions), OUTPUT_DTYPE)
        outputs["row"] = np.array(positions) - (positions[0] if start is None else start)
        outputs["position"] = np.array(positions) + 1
        outputs["top_p"] = outputs["repetition"] = 1
        outputs["mask"] = outputs["target"] = -1
        outputs["num_logprobs"] = num_logprobs
        return outputs

    def _step(
        self, ids: Sequence[int], start: int, stop: int, outputs: NDArray[np.void]
    ) -> tuple[NDArray[np.void], Int32s, NDArray[np.float32]]:
        if stop > self._blocks * BLOCK_TOKENS:
            limit = self._blocks * BLOCK_TOKENS
            raise ContextLengthError(f"text has {len(ids)} tokens, the limit is {limit}: raise context_tokens")
        return self._vm.step(
            np.array(ids[start:stop], np.int32),
            np.arange(start, stop, dtype=np.int32),
            np.array([0, stop - start], np.int32),
            np.arange(self._blocks, dtype=np.int32)[None],
            outputs,
        )
