"""Our engine with one barrier an operation, the first arm of the ablation: op_by_op.py FILE. In our own environment.

Its seconds are those of the VM's calls, as in `headrace bench engine --ablate`.
"""

import sys

import wire

from headrace.base.clock import SystemClock
from headrace.engine.ablate import OneStage
from headrace.protocol.launch import WorkerLaunch

stage = OneStage(WorkerLaunch(sys.argv[1], "op-by-op", -1, threads=wire.threads()), SystemClock(), 0)


def decode(prompt_tokens: int, output_tokens: int) -> wire.Answer:
    (prompt,) = wire.prompts(1, prompt_tokens)
    return {"tokens": output_tokens, "seconds": stage.decode_s(prompt, output_tokens)}


def prefill(prompt_tokens: int) -> wire.Answer:
    (prompt,) = wire.prompts(1, prompt_tokens)
    return {"tokens": prompt_tokens, "seconds": stage.prefill_s(prompt)}


stage.prefill_s(wire.prompts(1, 4)[0])
wire.serve({"decode": decode, "prefill": prefill})
