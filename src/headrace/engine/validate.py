"""What a Submit or Encode must satisfy before the engine takes it. The front checks too; the engine trusts no front.

After these checks no field of a request can make the VM, the scheduler or numpy fail (promise P1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.base.errors import ContextLengthError, RequestError
from headrace.protocol.frames import ID_BYTES, LEAST_POSITIVE, MAX_GRAMMAR_CHARS, Encode, EncodeForm, Sampling, Submit

MAX_SAMPLE_LOGPROBS = 20
MAX_ECHO_LOGPROBS = 256
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
MAX_TIMEOUT_S = 30 * 86400.0
MAX_TOKENS = 2**31 - 1
MAX_INPUTS = 2**17
MAX_MARKS = 64
MAX_MASKED_TOP = 1024


def check_submit(submit: Submit, *, vocab_size: int, context_tokens: int) -> None:
    """Checks one request against the model's limits.

    Raises:
        ContextLengthError: the prompt leaves no room for one token.
        RequestError: any other field is out of its range; ``param`` names it.
    """
    num_prompt = len(submit.prompt_ids)
    if num_prompt < 1:
        raise RequestError("prompt has 0 tokens, at least 1 is needed", param="prompt")
    if num_prompt >= context_tokens:
        raise ContextLengthError(
            f"prompt has {num_prompt} tokens, this worker's maximum context length is {context_tokens} tokens "
            "for prompt and output together: shorten the prompt, or raise kernel_config.max_sequence_length "
            "and kv_cache_size where the model and the memory allow it",
            param="prompt",
        )
    _check_ids("prompt", submit.prompt_ids, vocab_size)
    _check_range("max_tokens", submit.max_tokens, 1, MAX_TOKENS)
    _check_range("min_tokens", submit.min_tokens, 0, submit.max_tokens)
    _check_range("stop_token_ids", len(submit.stop_token_ids), 0, MAX_STOP_IDS)
    _check_ids("stop_token_ids", submit.stop_token_ids, vocab_size)
    _check_range("timeout_s", submit.timeout_s, 0.0, MAX_TIMEOUT_S)
    _check_range("priority", submit.priority, -(2**31), 2**31)
    if submit.echo_logprobs is not None:
        _check_range("prompt_logprobs", submit.echo_logprobs, 0, MAX_ECHO_LOGPROBS)
    if submit.allowed_token_ids is not None:
        _check_range("allowed_token_ids", len(submit.allowed_token_ids), 1, vocab_size)
        _check_ids("allowed_token_ids", submit.allowed_token_ids, vocab_size)
    _check_range("bad_words", len(submit.bad_words), 0, MAX_BAD_WORDS)
    for word in submit.bad_words:
        _check_range("bad_words", len(word), 1, MAX_BAD_WORD_TOKENS)
        _check_ids("bad_words", word, vocab_size)
    if submit.grammar is not None:
        _check_range("grammar", len(submit.grammar.source), 0, MAX_GRAMMAR_CHARS)
    _check_sampling(submit.sampling, vocab_size)


def check_encode(
    encode: Encode,
    *,
    vocab_size: int,
    context_tokens: int,
    width: int,
    forms: Sequence[EncodeForm],
    max_marks: int = MAX_MARKS,
) -> None:
    """Checks one request for vectors against the model's limits.

    Raises:
        ContextLengthError: an input is longer than the context.
        RequestError: any other field is out of its range; ``param`` names it.
    """
    _check_range("input", len(encode.inputs), 1, MAX_INPUTS)
    if encode.form not in forms:
        raise RequestError(
            f"form is {str(encode.form)!r}, this model has {', '.join(map(repr, map(str, forms)))}", param="form"
        )
    for index, packed in enumerate(encode.inputs):
        count, rest = divmod(len(packed), ID_BYTES)
        if not count or rest:
            raise RequestError(
                f"input {index} has {len(packed) / ID_BYTES:g} tokens, at least 1 is needed", param="input"
            )
        if count > context_tokens:
            raise ContextLengthError(
                f"input {index} has {count} tokens, this model's maximum context length is {context_tokens} tokens",
                param="input",
            )
        ids = np.frombuffer(packed, "<i4")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            _check_ids("input", ids.tolist(), vocab_size)
    if encode.second_starts:
        _check_range("second_starts", len(encode.second_starts), len(encode.inputs), len(encode.inputs))
        for packed, start in zip(encode.inputs, encode.second_starts, strict=True):
            _check_range("second_starts", start, 0, len(packed) // ID_BYTES)
    if encode.form is EncodeForm.MASKED:
        _check_range("num_top", encode.num_top, 1, min(MAX_MASKED_TOP, vocab_size))
        _check_range("marks", len(encode.marks), len(encode.inputs), len(encode.inputs))
        for packed, marks in zip(encode.inputs, encode.marks, strict=True):
            _check_range("marks", len(marks), 1, max_marks)
            for mark in marks:
                _check_range("marks", mark, 0, len(packed) // ID_BYTES - 1)
    if encode.dimensions is not None:
        _check_range("dimensions", encode.dimensions, 1, width)
    _check_range("timeout_s", encode.timeout_s, 0.0, MAX_TIMEOUT_S)
    _check_range("priority", encode.priority, -(2**31), 2**31)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    _check_range("temperature", sampling.temperature, 0.0, 1e6)
    _check_range("top_k", sampling.top_k, 0, 2**31 - 1)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0.0:
        raise RequestError("top_p is 0, it must be above 0 and at most 1", param="top_p")
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, LEAST_POSITIVE, 1e3)
    _check_range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.num_logprobs is not None:
        _check_range("top_logprobs", sampling.num_logprobs, 0, MAX_SAMPLE_LOGPROBS)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias names token {token}, the vocabulary is 0..{vocab_size - 1}", param="logit_bias"
            )
        _check_range("logit_bias", bias, -100.0, 100.0)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    # NaN compares false with everything, so it lands here too.
    if not low <= value <= high or not math.isfinite(value):
        raise RequestError(f"{name} is {value}, it must be from {low} to {high}", param=name)


def _check_ids(name: str, ids: list[int], vocab_size: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestError(f"{name} holds token id {wrong}, the vocabulary is 0..{vocab_size - 1}", param=name)
