"""Serves a peer to the harness: one JSON request a line on stdin, one JSON answer a line on the real stdout.

Runs in a peer's own environment, so it needs the standard library alone. A driver hands over functions by name; each
takes the request's other fields and returns the answer's. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

# The lowest ids of a vocabulary are special tokens; 49,000 is below the smallest vocabulary of the decoders.
FIRST_ID, LAST_ID = 100, 49_000
ENCODER_FIRST_ID, ENCODER_LAST_ID = 1_000, 30_000


def threads() -> int:
    """Returns how many threads to compute on."""
    return int(os.environ["PEERS_THREADS"])


def prompts(sequences: int, tokens: int, first: int = FIRST_ID, last: int = LAST_ID) -> list[list[int]]:
    """Returns fresh random prompts, so that no cache of prefixes can help."""
    return [[random.randrange(first, last) for _ in range(tokens)] for _ in range(sequences)]


def serve(methods: dict[str, Callable[..., Answer]]) -> None:
    """Answers until stdin ends. Says first that it is ready: the driver has loaded and made its first output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("do")
        try:
            if method in methods:
                answer = methods[method](**request)
            else:
                answer = {"error": f"cannot {method}"}
        except Exception as error:  # noqa: BLE001 - the harness writes it beside the cell; the other cells go on
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), file=out)


def top(logits: Any, count: int = 256) -> tuple[Any, Any]:
    """Returns ids and log-probabilities of the most likely tokens, most likely first, [P, count] each.

    Args:
        logits: [P, V].
    """
    import numpy as np

    values = np.asarray(logits, dtype=np.float64)
    values -= values.max(axis=1, keepdims=True)
    logprobs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :count].astype(np.int32)
    return ids, np.take_along_axis(logprobs, ids, axis=1)


def score(windows: str, out: str, logits_of: Callable[[list[int]], Any]) -> Answer:
    """Writes the distributions after every token but the last of each window (JSON: lists of ids) as an .npz file.

    Args:
        logits_of: gives [T, V] for T tokens.
    """
    import numpy as np

    found = [top(logits_of(window)[:-1]) for window in json.loads(Path(windows).read_text())]
    np.savez(out, ids=np.concatenate([ids for ids, _ in found]), logprobs=np.concatenate([part for _, part in found]))
    return {"positions": sum(len(ids) for ids, _ in found)}
