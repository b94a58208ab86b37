"""Says whether vLLM's CPU build makes a token on this machine: try_vllm.py MODEL DTYPE."""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    model = LLM(model=sys.argv[1], dtype=sys.argv[2], max_model_len=256, max_num_seqs=2, enforce_eager=True)
    (answer,) = model.generate([{"prompt_token_ids": [500, 600, 700]}], SamplingParams(max_tokens=1, temperature=0))
    print(answer.outputs[0].token_ids)


if __name__ == "__main__":
    main()
