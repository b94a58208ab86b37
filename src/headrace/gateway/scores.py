"""Log-probabilities of a prompt's tokens, in vLLM's form: one object per position, by token id."""

from __future__ import annotations

from typing import Protocol

from headrace.protocol.answers import finite
from headrace.protocol.frames import TokenLogprobs


class TokenText(Protocol):
    """What gives the bytes of a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of one token."""
        ...


def prompt_logprobs(
    ids: list[int], scores: dict[int, TokenLogprobs], tokenizer: TokenText, num_top: int
) -> list[dict[str, object] | None]:
    """Gives for each prompt token its own log-probability and the ``num_top`` likeliest; None for the first.

    A token's ``rank`` is given where it is among the likeliest, else null: the engine does not count the others.
    """
    out: list[dict[str, object] | None] = []
    for position, token in enumerate(ids):
        score = scores.get(position)
        if score is None:
            out.append(None)
            continue
        entry: dict[str, object] = {}
        for rank, (other, logprob) in enumerate(zip(score.top_ids, score.top_logprobs, strict=True), 1):
            if rank <= num_top or other == token:
                entry[str(other)] = _shown(other, logprob, rank, tokenizer)
        entry.setdefault(str(token), _shown(token, score.logprob, None, tokenizer))
        out.append(entry)
    return out


def _shown(token: int, logprob: float, rank: int | None, tokenizer: TokenText) -> dict[str, object]:
    text = tokenizer.token_bytes(token).decode("utf-8", "replace")
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
