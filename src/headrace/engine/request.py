"""One request while the engine has it: its tokens, its place in the pool, and what it may still do.

A request is one sequence (the front fans ``n`` out). The scheduler owns and changes it; the executor only reads.
Tokens are never lost: preemption drops the KV of all of them and keeps the ids, which are then computed again.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.prefix import HashChain
from headrace.protocol.frames import Finished, FinishReason, Submit, TokenLogprobs

# Added to the logits of tokens that may not be chosen yet. Far below any logit, far from overflow in f32.
BANNED_BIAS = -1.0e9

Bias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class TokenRule(Protocol):
    """What an answer must follow, token by token: a grammar's state (``text.grammar.GrammarState``)."""

    failure: str | None

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Writes which tokens may come next: [words] u32, bit t of word t/32 is token t."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the chosen token; gives whether the answer is complete with it."""
        ...

    def is_end(self, token: int) -> bool:
        """Whether the token ends the answer and is no part of it."""
        ...


class Request:
    """State of one request.

    Args:
        owner: the connection it came from; ``submit.request_id`` is unique there.
        submit: what was asked, validated; kept without its prompt.
        order: arrival number; the smaller of two equal priorities runs first.
        eos_token_ids: the model's own ends, used unless ``ignore_eos``.
        context_tokens: prompt and output together never exceed this.
        rule: None, or what its tokens must follow; kept over a preemption, as the tokens are.
    """

    __slots__ = (
        "_allowed",
        "_bad_words",
        "_banned_bias",
        "_bias",
        "admitted_at_s",
        "arrived_at_s",
        "blocks",
        "cached_tokens",
        "chain",
        "counts",
        "deadline_at_s",
        "first_token_at_s",
        "is_ended",
        "last_token",
        "num_computed",
        "num_passed",
        "num_preemptions",
        "num_prompt",
        "num_published",
        "num_scored",
        "num_tokens",
        "order",
        "owner",
        "rule",
        "seat",
        "slot",
        "stop_array",
        "stop_ids",
        "submit",
        "token_limit",
        "tokens",
    )

    def __init__(
        self,
        owner: int,
        submit: Submit,
        *,
        order: int,
        now_s: float,
        eos_token_ids: frozenset[int],
        context_tokens: int,
        rule: TokenRule | None = None,
    ) -> None:
        self.owner = owner
        self.rule = rule
        # The ids live on as an array: as a list they take nine times the memory, and thousands may wait.
        self.submit = msgspec.structs.replace(submit, prompt_ids=[], allowed_token_ids=None, bad_words=[])
        self.order = order
        self.arrived_at_s = now_s
        self.deadline_at_s = now_s + submit.timeout_s
        self.admitted_at_s: float | None = None
        self.first_token_at_s: float | None = None
        self.num_prompt = len(submit.prompt_ids)
        self.num_tokens = self.num_prompt
        self.token_limit = min(self.num_prompt + submit.max_tokens, context_tokens)
        self.tokens = np.array(submit.prompt_ids, np.int32)  # grows to [token_limit] when it is let in
        self.last_token = submit.prompt_ids[-1]
        self.num_computed = 0
        self.num_published = 0  # blocks offered to the prefix cache, or taken from it
        self.num_scored = 1  # next prompt position to score; the first token has no probability
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.blocks: list[int] = []  # in sequence order; the first num_passed are given back, their ids are stale
        self.num_passed = 0
        self.chain = HashChain(submit.cache_salt)
        self.slot = -1  # row of the executor's tables while running
        self.seat = 0  # changes each time that it is let in
        self.is_ended = False
        self.stop_ids = frozenset(submit.stop_token_ids) | (frozenset() if submit.ignore_eos else eos_token_ids)
        self.stop_array = np.array(sorted(self.stop_ids), np.int32)
        sampling = submit.sampling
        self.counts: TokenCounts | None = None
        if sampling.repetition_penalty != 1.0:
            self.counts = TokenCounts(self.tokens)
        elif sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            self.counts = TokenCounts(self.tokens[:0])  # these two look at the output only
        self._allowed = None if submit.allowed_token_ids is None else _bits(submit.allowed_token_ids)
        self._bad_words = [(word[:-1], word[-1]) for word in submit.bad_words]
        self._bias = _bias(sampling.logit_bias)
        banned = {**sampling.logit_bias, **dict.fromkeys(self.stop_ids, BANNED_BIAS)} if submit.min_tokens else {}
        self._banned_bias = _bias(banned)

    @property
    def importance(self) -> tuple[int, int]:
        """Sort key: smaller runs first and is preempted last."""
        return (self.submit.priority, self.order)

    @property
    def held_blocks(self) -> list[int]:
        """Blocks that are this sequence's to read and write."""
        return self.blocks[self.num_passed :] if self.num_passed else self.blocks

    @property
    def num_output(self) -> int:
        """Tokens generated and delivered."""
        return self.num_tokens - self.num_prompt

    @property
    def bias(self) -> Bias | None:
        """Ids (ascending) and what is added to their logits for the next token; None for nothing."""
        return self._banned_bias if self.num_output < self.submit.min_tokens else self._bias

    @property
    def has_mask(self) -> bool:
        """Whether only some tokens may be chosen next."""
        return self.rule is not None or self._allowed is not None or bool(self._bad_words)

    @property
    def is_plain(self) -> bool:
        """Whether what it chooses next depends on the tokens before only: no penalties, biases or masks."""
        return self.counts is None and not self.has_mask and self.bias is None

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Writes which tokens may be chosen next: [words] u32, bit t of word t/32 is token t."""
        if self.rule is not None:
            self.rule.fill(mask)
        else:
            mask[:] = np.uint32(0xFFFFFFFF)
        if self._allowed is not None:
            num_words = len(self._allowed)
            mask[:num_words] &= self._allowed
            mask[num_words:] = 0
        if self._bad_words:
            self._ban_words(mask)

    def _ban_words(self, mask: npt.NDArray[np.uint32]) -> None:
        """Takes out each token that would complete a bad word, but for those that are all there is to choose."""
        before = mask.copy()
        for head, last in self._bad_words:
            start = self.num_tokens - len(head)
            if start >= self.num_prompt and self.tokens[start : self.num_tokens].tolist() == head:
                mask[last >> 5] &= np.uint32(~(1 << (last & 31)) & 0xFFFFFFFF)
        if not mask.any():
            mask[:] = before

    def grow(self) -> None:
        """Makes room for all tokens that it may ever have; waiting requests hold only their prompt."""
        if len(self.tokens) < self.token_limit:
            grown = np.empty(self.token_limit, np.int32)
            grown[: self.num_tokens] = self.tokens[: self.num_tokens]
            self.tokens = grown

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.last_token = token
        if self.counts is not None:
            self.counts.add(token)

    def finished(
        self,
        reason: FinishReason,
        now_s: float,
        stop_token_id: int | None = None,
        stop_logprobs: TokenLogprobs | None = None,
    ) -> Finished:
        """Returns the event that ends it well."""
        admitted_at_s = now_s if self.admitted_at_s is None else self.admitted_at_s
        first_token_at_s = now_s if self.first_token_at_s is None else self.first_token_at_s
        return Finished(
            request_id=self.submit.request_id,
            reason=reason,
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_output,
            queue_s=admitted_at_s - self.arrived_at_s,
            prefill_s=first_token_at_s - admitted_at_s,
            decode_s=now_s - first_token_at_s,
            stop_token_id=stop_token_id,
            num_preemptions=self.num_preemptions,
            stop_logprobs=stop_logprobs,
        )


class TokenCounts:
    """How often each token stands in the output, and whether it stands in the prompt: what penalties look at.

    Kept sorted and counted as tokens arrive, so that a step copies and never counts. The encoding is the VM's:
    a count n ≥ 0 for output only, −1 − n for a token that is also in the prompt.
    """

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        self.ids = np.unique(prompt)  # [n] i32, ascending
        self.counts = np.full(len(self.ids), -1, np.int32)  # [n]

    def add(self, token: int) -> None:
        """Counts one generated token. Cost: O(log n), O(n) when the token is new."""
        index = int(np.searchsorted(self.ids, token))
        if index < len(self.ids) and self.ids[index] == token:
            self.counts[index] += 1 if self.counts[index] >= 0 else -1
        else:
            self.ids = np.insert(self.ids, index, token)
            self.counts = np.insert(self.counts, index, 1)


def _bits(ids: list[int]) -> npt.NDArray[np.uint32]:
    """Gives ids as bits, as far as the highest of them reaches."""
    flags = np.zeros(-(-(max(ids) + 1) // 32) * 32, np.bool_)
    flags[ids] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _bias(values: dict[int, float]) -> Bias | None:
    if not values:
        return None
    ids = sorted(values)
    return np.array(ids, np.int32), np.array([values[token] for token in ids], np.float32)
