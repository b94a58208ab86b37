"""Exports a sentence encoder to ONNX, fp32 and dynamic int8: encoder.py MODEL FOLDER. Runs in the torch environment.

Token ids go in, the pooled and normalised vector comes out.
"""

import sys
from pathlib import Path

import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoModel

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
model = AutoModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()


class Pooled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).float()
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9), dim=-1)


texts, tokens = torch.export.Dim("texts"), torch.export.Dim("tokens", max=512)
example = torch.ones(2, 16, dtype=torch.long)
shapes = {0: texts, 1: tokens}
torch.onnx.export(
    Pooled(),
    (example, example),
    str(folder / "fp32.onnx"),
    input_names=["input_ids", "attention_mask"],
    output_names=["vector"],
    dynamic_shapes={"input_ids": shapes, "attention_mask": shapes},
    dynamo=True,
)
quantize_dynamic(str(folder / "fp32.onnx"), str(folder / "int8.onnx"), weight_type=QuantType.QInt8)
