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

from headrace.base.errors import ContextLengthError, NumericalError
from headrace.engine.weights import load_weights
from headrace.program.encode import encode
from headrace.program.opcodes import BLOCK_TOKENS, MAX_LOGPROBS, KvType
from headrace.program.records import OUTPUT_DTYPE
from headrace.program.spec import build_program, spec_from_files
from headrace.program.verify import verify
from headrace.program.verify_lowered import verify_encoded
from headrace.registry.model import open_model

Int32s = NDArray[np.int32]
# A remainder is what the listed probabilities leave of 1; their float32 logarithms make it uncertain by about this.
_MIN_REST = 1e-6


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
        rest_p, rest_q = max(1.0 - p.sum(), _MIN_REST), max(1.0 - q.sum(), _MIN_REST)
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
    """A model in one configuration, loaded to be asked for distributions and greedy answers.

    Args:
        path: folder or file.
        dtype: ``fp32`` is the exact path: f32 weights, activations and KV.
        quantization: ``none``, ``int8``, ``int4``.
        context_tokens: longest sequence.
        sequences: prompts that are continued together.
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
        sequences: int = 32,
        rows: int = 128,
    ) -> None:
        # Late: what only compares must import where the native library is not built.
        from headrace.kernels.vm import KvConfig, Vm

        assert rows >= sequences
        files = open_model(path, has_vocabulary=False)
        spec = spec_from_files(files)
        program = build_program(spec)
        verify(program)
        encoded = encode(program, rows)
        verify_encoded(program, encoded)
        blocks = -(-context_tokens // BLOCK_TOKENS)
        self._rows = rows
        self._tables = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        self._num_top = min(MAX_LOGPROBS, spec.vocab_size)
        weights = load_weights(
            files,
            program,
            dtype=dtype,
            quantization=quantization,
            rope_positions=blocks * BLOCK_TOKENS,
            threads=threads,
        )
        kv_type = KvType.F32 if dtype == "fp32" else KvType.BF16
        self._vm = Vm(
            encoded.records,
            encoded.arena_bytes,
            weights,
            threads=threads,
            isa=isa,
            max_rows=rows,
            max_sequences=sequences,
            max_outputs=rows,
            max_top=self._num_top,
            kv=KvConfig(kv_type, spec.layers, spec.kv_heads, spec.head_size, sequences * blocks),
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
        self._check_length(len(text))
        for start in range(0, len(text) - 1, self._rows):
            stop = min(start + self._rows, len(text) - 1)
            outputs = _output_rows(stop - start)
            outputs["num_logprobs"] = self._num_top
            outputs["target"] = text[start + 1 : stop + 1]
            results, ids, logprobs = self._step([(0, start, text[start:stop])], outputs)
            yield ids, logprobs.astype(np.float64), results["logprob"].astype(np.float64)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Returns the greedy continuations of the prompts, end-of-sequence ids included.

        Raises:
            ContextLengthError: a prompt and its continuation are longer than the context.
        """
        answers: list[list[int]] = []
        for first in range(0, len(prompts), len(self._tables)):
            answers += self._continue(prompts[first : first + len(self._tables)], num_tokens)
        return answers

    def _continue(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        answers = []
        for seq, prompt in enumerate(prompts):
            self._check_length(len(prompt) + num_tokens)
            for start in range(0, len(prompt), self._rows):
                chunk = prompt[start : start + self._rows]
                outputs = _output_rows(1)
                outputs["row"] = len(chunk) - 1
                results, _, _ = self._step([(seq, start, chunk)], outputs)
            answers.append([int(results["token"][0])])
        for _ in range(num_tokens - 1):
            rows = [
                (seq, len(prompt) + len(answer) - 1, answer[-1:])
                for seq, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            ]
            results, _, _ = self._step(rows, _output_rows(len(rows)))
            for answer, token in zip(answers, results["token"].tolist(), strict=True):
                answer.append(token)
        return answers

    def _check_length(self, tokens: int) -> None:
        limit = self._tables.shape[1] * BLOCK_TOKENS
        if tokens > limit:
            raise ContextLengthError(f"text has {tokens} tokens, the limit is {limit}: raise context_tokens")

    def _step(
        self, chunks: Sequence[tuple[int, int, Sequence[int]]], outputs: NDArray[np.void]
    ) -> tuple[NDArray[np.void], Int32s, NDArray[np.float32]]:
        """Runs one step of chunks (sequence, first position, token ids)."""
        results, ids, logprobs = self._vm.step(
            np.array([token for _, _, tokens in chunks for token in tokens], np.int32),
            np.concatenate([np.arange(start, start + len(ids), dtype=np.int32) for _, start, ids in chunks]),
            np.cumsum([0, *(len(tokens) for _, _, tokens in chunks)]).astype(np.int32),
            np.ascontiguousarray(self._tables[[seq for seq, _, _ in chunks]]),
            outputs,
        )
        if results["status"].any():
            raise NumericalError("the model's logits are not numbers: its weights hold NaN or overflow")
        return results, ids, logprobs


def _output_rows(count: int) -> NDArray[np.void]:
    """Returns greedy output rows, one per row of the step."""
    outputs = np.zeros(count, OUTPUT_DTYPE)
    outputs["row"] = np.arange(count)
    outputs["top_p"] = outputs["repetition"] = 1
    outputs["mask"] = outputs["target"] = outputs["num_logprobs"] = -1
    return outputs
