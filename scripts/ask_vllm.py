"""vLLM's most likely next tokens, for `packed-models`; runs in vLLM's environment: ask_vllm.py FOLDER WINDOWS OUT.

vLLM's build for CPUs without AVX-512 lacks the one operation that multiplies four-bit weights, `_C::cpu_gemm_wna16`.
There a plain reference stands in for it: it undoes the layout that vLLM's loader made, dequantises and multiplies in
float32. Reading the files, repacking and the rest of the model stay vLLM's. It runs in float32 there, as in
`benchmarks/peers`, which vLLM's AWQ and GPTQ otherwise refuse. OUT says how often the reference was called.
"""

import json
import sys

import torch
import vllm._custom_ops  # noqa: F401 - loads the operations
from vllm import LLM, SamplingParams

HAS_OPERATION = hasattr(torch.ops._C, "cpu_gemm_wna16")
# Sixteen outputs stand together, eight to a word.
BLOCK, WORD = 16, 8
num_calls = 0


def unpack(words: torch.Tensor) -> torch.Tensor:
    """Gives the four-bit numbers of [rows, columns / 8] words as [rows, columns], lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1)


def multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    pack_factor: int,
    isa_hint: str,
) -> None:
    """Writes rows [M, K] times the dequantised weight [K, N] into out [M, N].

    Args:
        weight: [N / 16, K * 2] words.
        scales: [K / group, N].
        zeros: [K / group, N / 8] words, or None where every zero is 8.
    """
    global num_calls
    num_calls += 1
    num_inputs, num_outputs = rows.size(1), scales.size(1)
    words = weight.view(num_outputs // BLOCK, num_inputs, BLOCK // WORD).permute(1, 0, 2)
    numbers = unpack(words.reshape(num_inputs, num_outputs // WORD))
    group = num_inputs // scales.size(0)
    middle = 8 if zeros is None else unpack(zeros).repeat_interleave(group, 0)
    product = rows.float() @ ((numbers - middle) * scales.float().repeat_interleave(group, 0))
    out.copy_(product if bias is None else product + bias.float())


def stand_in() -> None:
    """Registers the reference, and lets AWQ and GPTQ run in float32."""
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig

    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cpu_gemm_wna16(Tensor rows, Tensor weight, Tensor(a!) out, Tensor scales, Tensor? zeros, Tensor? bias, "
        "int pack_factor, str isa_hint) -> ()"
    )
    library.impl("cpu_gemm_wna16", multiply, "CPU")
    for config in (AutoAWQConfig, AutoGPTQConfig):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.half, torch.bfloat16, torch.float32])
    globals()["_library"] = library  # its operations go when it does


def main() -> None:
    folder, windows, out = sys.argv[1:]
    if not HAS_OPERATION:
        stand_in()
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16" if HAS_OPERATION else "float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=256,
    )
    with open(windows) as file:
        prompts = [{"prompt_token_ids": window} for window in json.load(file)]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    top = [
        min(seen, key=lambda token: seen[token].rank)
        for answer in llm.generate(prompts, params)
        for seen in answer.prompt_logprobs[1:]
    ]
    with open(out, "w") as file:
        json.dump({"top": top, "reference_calls": num_calls}, file)


if __name__ == "__main__":
    main()
