"""OpenVINO GenAI: decode_openvino.py FOLDER. Continuous batching, no prefix cache; scores with the plain model."""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
import wire

FOLDER = sys.argv[1]
PROPERTIES = {"INFERENCE_NUM_THREADS": wire.threads()}
_config = openvino_genai.SchedulerConfig()
_config.cache_size = 3  # GiB
_config.max_num_batched_tokens = 2048
_config.max_num_seqs = 64
_config.enable_prefix_caching = False
_config.dynamic_split_fuse = True
pipeline = openvino_genai.ContinuousBatchingPipeline(FOLDER, _config, "CPU", PROPERTIES)
_number = 0


def options(tokens: int) -> Any:
    found = openvino_genai.GenerationConfig()
    found.max_new_tokens = found.min_new_tokens = tokens
    found.ignore_eos = True
    found.do_sample = False
    found.apply_chat_template = False
    return found


def tensor(prompt: list[int]) -> Any:
    return openvino.Tensor(np.array([prompt], dtype=np.int64))


def step_times(prompt: list[int], output_tokens: int) -> list[float]:
    """Returns the moment of the start and of each token."""
    global _number
    _number += 1
    held = pipeline.add_request(_number, tensor(prompt), options(output_tokens))  # when it goes, the request goes
    times = [time.perf_counter()]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        times.append(time.perf_counter())
    assert len(times) > output_tokens, f"{len(times) - 1} steps for {output_tokens} tokens"
    del held
    return times


def decode(prompt_tokens: int, output_tokens: int) -> wire.Answer:
    (prompt,) = wire.prompts(1, prompt_tokens)
    # A long prompt takes several steps; only the last steps are one token each.
    times = step_times(prompt, output_tokens + 1)[-output_tokens - 1 :]
    return {"tokens": output_tokens, "seconds": times[-1] - times[0]}


def batch(sequences: int, prompt_tokens: int, output_tokens: int) -> wire.Answer:
    tensors = [tensor(prompt) for prompt in wire.prompts(sequences, prompt_tokens)]
    started_at_s = time.perf_counter()
    results = pipeline.generate(tensors, [options(output_tokens)] * sequences)
    seconds = time.perf_counter() - started_at_s
    assert all(len(result.m_generation_ids[0]) == output_tokens for result in results)
    return {"tokens": sequences * output_tokens, "seconds": seconds}


def prefill(prompt_tokens: int) -> wire.Answer:
    (prompt,) = wire.prompts(1, prompt_tokens)
    times = step_times(prompt, 1)
    return {"tokens": prompt_tokens, "seconds": times[-1] - times[0]}


def score(windows: str, out: str) -> wire.Answer:
    core = openvino.Core()
    model = core.compile_model(str(Path(FOLDER) / "openvino_model.xml"), "CPU", PROPERTIES)
    request = model.create_infer_request()
    names = {name for port in model.inputs for name in port.get_names()}

    def logits_of(window: list[int]) -> Any:
        request.reset_state()
        shape = (1, len(window))
        given = {
            "input_ids": np.array([window], dtype=np.int64),
            "attention_mask": np.ones(shape, dtype=np.int64),
            "position_ids": np.arange(len(window), dtype=np.int64).reshape(shape),
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request.infer({name: value for name, value in given.items() if name in names})
        return request.get_tensor("logits").data[0].copy()

    return wire.score(windows, out, logits_of)


step_times(wire.prompts(1, 4)[0], 1)
wire.serve({"decode": decode, "batch": batch, "prefill": prefill, "score": score})
