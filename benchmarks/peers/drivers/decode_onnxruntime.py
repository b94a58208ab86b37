"""onnxruntime-genai: decode_onnxruntime.py FOLDER."""

import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai
import wire

_config = onnxruntime_genai.Config(sys.argv[1])
_config.overlay(f'{{"model": {{"decoder": {{"session_options": {{"intra_op_num_threads": {wire.threads()}}}}}}}}}')
model = onnxruntime_genai.Model(_config)


def generator(sequences: int, tokens: int) -> Any:
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=tokens, min_length=tokens, batch_size=sequences, do_sample=False)
    return onnxruntime_genai.Generator(model, parameters)


def run(sequences: int, prompt_tokens: int, output_tokens: int) -> list[float]:
    """Returns the moment of the start and of each token."""
    found = generator(sequences, prompt_tokens + output_tokens)
    given = np.array(wire.prompts(sequences, prompt_tokens), dtype=np.int32)
    times = [time.perf_counter()]
    found.append_tokens(given if sequences > 1 else given[0])
    for _ in range(output_tokens):
        found.generate_next_token()
        times.append(time.perf_counter())
    assert len(found.get_sequence(0)) == prompt_tokens + output_tokens
    return times


def decode(prompt_tokens: int, output_tokens: int) -> wire.Answer:
    times = run(1, prompt_tokens, output_tokens + 1)
    return {"tokens": output_tokens, "seconds": times[-1] - times[1]}


def batch(sequences: int, prompt_tokens: int, output_tokens: int) -> wire.Answer:
    times = run(sequences, prompt_tokens, output_tokens)
    return {"tokens": sequences * output_tokens, "seconds": times[-1] - times[0]}


def prefill(prompt_tokens: int) -> wire.Answer:
    times = run(1, prompt_tokens, 1)
    return {"tokens": prompt_tokens, "seconds": times[-1] - times[0]}


def score(windows: str, out: str) -> wire.Answer:
    def logits_of(window: list[int]) -> Any:
        """The model gives the last row only: the window goes in token by token."""
        found, rows = generator(1, len(window) + 1), []
        for token in window:
            found.append_tokens(np.array([token], dtype=np.int32))
            rows.append(np.array(found.get_logits(), dtype=np.float32).reshape(-1))
        return np.stack(rows)

    return wire.score(windows, out, logits_of)


run(1, 4, 1)
wire.serve({"decode": decode, "batch": batch, "prefill": prefill, "score": score})
