"""The determinism contract as an experiment: the same seeded requests under every disturbance that must not show.

Used by the ordinary suite on a tiny random model and by the marked test on the demo model. What a disturbance claims to
do (hit the cache, preempt, cut chunks) is asked back from the machine, so an experiment that disturbs nothing fails.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import msgspec

from headrace.base.clock import SystemClock
from headrace.engine.loader import inspect, load
from headrace.protocol.frames import Finished, Sampling, Submit, Tokens
from headrace.protocol.launch import WorkerLaunch
from headrace.testing.machine import Machine


def make_requests(count: int, *, vocab_size: int, longest_prompt: int, max_tokens: int) -> list[Submit]:
    """Returns seeded requests of many kinds: greedy, sampled, filtered, penalised, biased, with log-probabilities."""
    rng = random.Random(count)  # noqa: S311  # repeatable test data, nothing secret
    shared = [rng.randrange(vocab_size) for _ in range(longest_prompt)]
    requests = []
    for index in range(count):
        length = rng.randint(1, longest_prompt)
        # Half of the prompts begin alike, so that a warm cache has something to give.
        start = shared[: length // 2] if index % 2 else []
        prompt = start + [rng.randrange(vocab_size) for _ in range(length - len(start))]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.0, 2.5]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 0.95, 0.5]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            seed=rng.getrandbits(63),
            logit_bias=rng.choice([{}, {rng.randrange(vocab_size): 5.0, rng.randrange(vocab_size): -100.0}]),
            num_logprobs=rng.choice([None, None, 3]),
        )
        requests.append(Submit(f"r{index}", prompt, max_tokens, sampling, ignore_eos=True))
    return requests


def make_machine(
    model_path: Path,
    *,
    threads: int = 1,
    max_step_tokens: int = 512,
    kv_cache_tokens: int | None = None,
    max_context_tokens: int = 512,
    prefix_cache: bool = True,
    isa: str | None = None,
    dtype: str = "bf16",
    quantization: str = "none",
) -> Machine:
    """Returns a machine with the real VM over the model."""
    launch = WorkerLaunch(
        model_path=str(model_path),
        served_name="determinism",
        socket_fd=-1,
        threads=threads,
        isa=isa,
        dtype=dtype,
        quantization=quantization,
        max_step_tokens=max_step_tokens,
        max_context_tokens=max_context_tokens,
        kv_cache_tokens=kv_cache_tokens or 32 * max_context_tokens,
        prefix_cache=prefix_cache,
    )
    inspection = inspect(launch)
    return Machine(inspection.scheduler_config, load(inspection, SystemClock()).vm)


def run_alone(machine: Machine, requests: Iterable[Submit]) -> dict[str, list[object]]:
    """Runs the requests one after the other, each under a salt of its own; returns what each heard."""
    heard: dict[str, list[object]] = {}
    for request in requests:
        machine.run(msgspec.structs.replace(request, cache_salt=request.request_id))
        heard[request.request_id] = heard_by(machine, request.request_id)
    return heard


def run_together(machine: Machine, requests: list[Submit]) -> dict[str, list[object]]:
    """Runs all requests at once; returns what each heard."""
    machine.run(*requests)
    return {request.request_id: heard_by(machine, request.request_id) for request in requests}


def heard_by(machine: Machine, request_id: str) -> list[object]:
    """Returns a request's tokens and log-probabilities, bit for bit, and how it ended."""
    ending = machine.ending(request_id)
    assert isinstance(ending, Finished), ending
    heard = [event for event in machine.events[request_id] if isinstance(event, Tokens)]
    tokens = [token for event in heard for token in event.ids]
    scores = [entry for event in heard for entry in event.logprobs]
    return [*tokens, *scores, ending.reason]
