"""CTranslate2: decode_ctranslate2.py FOLDER COMPUTE_TYPE."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import wire

FOLDER, COMPUTE_TYPE = sys.argv[1:3]
generator = ctranslate2.Generator(
    FOLDER, device="cpu", compute_type=COMPUTE_TYPE, inter_threads=1, intra_threads=wire.threads()
)
WORDS = json.loads((Path(FOLDER) / "vocabulary.json").read_text())


def run(sequences: int, prompt_tokens: int, output_tokens: int) -> float:
    given = [[WORDS[token] for token in prompt] for prompt in wire.prompts(sequences, prompt_tokens)]
    started_at_s = time.perf_counter()
    results = generator.generate_batch(
        given,
        max_length=output_tokens,
        min_length=output_tokens,
        sampling_topk=1,
        beam_size=1,
        include_prompt_in_result=False,
        max_batch_size=sequences,
    )
    seconds = time.perf_counter() - started_at_s
    assert all(len(result.sequences_ids[0]) == output_tokens for result in results)
    return seconds


def decode(prompt_tokens: int, output_tokens: int) -> wire.Answer:
    """It gives no moments of tokens: a long run less a short one."""
    seconds = run(1, prompt_tokens, output_tokens + 1) - run(1, prompt_tokens, 1)
    return {"tokens": output_tokens, "seconds": seconds}


def batch(sequences: int, prompt_tokens: int, output_tokens: int) -> wire.Answer:
    return {"tokens": sequences * output_tokens, "seconds": run(sequences, prompt_tokens, output_tokens)}


def prefill(prompt_tokens: int) -> wire.Answer:
    return {"tokens": prompt_tokens, "seconds": run(1, prompt_tokens, 1)}


def score(windows: str, out: str) -> wire.Answer:
    def logits_of(window: list[int]) -> Any:
        given = ctranslate2.StorageView.from_array(np.array([window], dtype=np.int32))
        lengths = ctranslate2.StorageView.from_array(np.array([len(window)], dtype=np.int32))
        return np.array(generator.forward_batch(given, lengths, return_log_probs=True))[0]

    return wire.score(windows, out, logits_of)


run(1, 4, 1)
wire.serve({"decode": decode, "batch": batch, "prefill": prefill, "score": score})
