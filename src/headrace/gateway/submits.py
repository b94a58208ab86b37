"""What a generating request asks of the worker: one ``Submit`` for each choice of each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.base.errors import RequestError
from headrace.gateway.render import Prompt, context_error
from headrace.gateway.ticket import BACKSTOP_S
from headrace.protocol.frames import LEAST_POSITIVE, Grammar, Sampling, Submit
from headrace.protocol.openai import ChatRequest, CompletionRequest, GenerateRequest, Options

_MASK64: Final = 2**64 - 1
# Odd, so that seed + index · step never repeats within n ≤ 8 (the golden ratio in 64 bits, as in splitmix64).
_SEED_STEP: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a sequence may be, and what a request that names no ``max_tokens`` gets."""

    context_tokens: int
    default_completion_tokens: int
    default_chat_tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a request.

    Args:
        is_alone: the prompt itself is all that is wanted.
    """

    submit: Submit
    prompt: Prompt
    is_alone: bool


def make_parts(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    lengths: Lengths,
    *,
    next_id: Iterator[str],
    seed: int,
    grammar: Grammar | None,
    bad_words: list[list[int]],
    timeout_s: float,
) -> Iterator[Part]:
    """Gives the sequences of a request: prompts × ``best_of``.

    Args:
        seed: of the request; every choice gets its own from it.
        bad_words: token sequences that no answer may hold.
        timeout_s: of the front; the worker's own comes later.

    Raises:
        ContextLengthError: prompt and output do not fit the context.
    """
    options = request.options
    for prompt in prompts:
        max_tokens, is_alone = _max_tokens(request, len(prompt.ids), lengths)
        for choice in range(options.best_of):
            submit = Submit(
                request_id=next(next_id),
                prompt_ids=prompt.ids,
                max_tokens=max_tokens,
                sampling=_sampling(options, (seed + choice * _SEED_STEP) & _MASK64),
                min_tokens=min(options.min_tokens, max_tokens),
                stop_token_ids=list(options.stop_token_ids),
                ignore_eos=options.ignore_eos,
                timeout_s=timeout_s + BACKSTOP_S,
                priority=options.priority,
                cache_salt=options.cache_salt,
                echo_logprobs=_num_prompt_logprobs(request),
                allowed_token_ids=list(options.allowed_token_ids) or None,
                bad_words=bad_words,
                grammar=grammar,
            )
            yield Part(submit, prompt, is_alone)


def is_echo(request: GenerateRequest) -> bool:
    """Whether the answer begins with the prompt."""
    return isinstance(request, CompletionRequest) and request.echo


def check_vocabulary(request: GenerateRequest, vocab_size: int) -> None:
    """Refuses token ids that the model does not have.

    Raises:
        RequestError: names the field and the id.
    """
    options = request.options
    named: list[tuple[str, Sequence[int]]] = [
        ("logit_bias", list(options.logit_bias)),
        ("stop_token_ids", options.stop_token_ids),
        ("allowed_token_ids", options.allowed_token_ids),
    ]
    if isinstance(request, CompletionRequest):
        named += [("prompt", prompt) for prompt in request.prompts if isinstance(prompt, list)]
    for name, ids in named:
        if ids and max(ids) >= vocab_size:
            raise RequestError(
                f"{name} has the token id {max(ids)}, which is out of vocabulary: this model's {vocab_size} ids are 0 "
                f"to {vocab_size - 1}",
                param=name,
            )


def _num_prompt_logprobs(request: GenerateRequest) -> int | None:
    """How many alternatives to score for each prompt token; None for no scores."""
    options = request.options
    wanted = [options.num_logprobs if is_echo(request) else None, options.prompt_logprobs]
    return max((number for number in wanted if number is not None), default=None)


def _max_tokens(request: GenerateRequest, prompt_tokens: int, lengths: Lengths) -> tuple[int, bool]:
    """Gives the output limit of a prompt, and whether only the prompt itself is wanted."""
    room = lengths.context_tokens - prompt_tokens
    is_chat = isinstance(request, ChatRequest)
    param = "messages" if is_chat else "prompt"
    asked = request.options.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise context_error(prompt_tokens, asked or 0, lengths.context_tokens, param)
    if asked is None:
        default = lengths.default_chat_tokens if is_chat else lengths.default_completion_tokens
        return min(default, room), False
    return max(asked, 1), asked == 0


def _sampling(options: Options, seed: int) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=max(options.top_p, LEAST_POSITIVE),
        min_p=options.min_p,
        repetition_penalty=max(options.repetition_penalty, LEAST_POSITIVE),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=seed,
        logit_bias=options.logit_bias,
        num_logprobs=0 if options.num_logprobs is None and options.best_of > options.n else options.num_logprobs,
    )
