"""Exports a sentence encoder to ONNX, fp32 and dynamic int8: encoder.py MODEL FOLDER. Runs in the torch environment.

Token ids go in, the pooled and normalised vector comes out.
"""

import sys
from pathlib import Path

import onnxruntime
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


# Two tensors: of one tensor given twice the export makes one input, and the ids would be the mask.
ids, mask = torch.randint(1000, 30000, (2, 16)), torch.ones(2, 16, dtype=torch.long)
shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens", max=512)}
torch.onnx.export(
    Pooled().eval(),
    (ids, mask),
    str(folder / "fp32.onnx"),
    input_names=["input_ids", "attention_mask"],
    output_names=["vector"],
    dynamic_shapes={"input_ids": shape, "attention_mask": shape},
    dynamo=True,
)
ids = torch.randint(1000, 30000, (3, 40))
with torch.inference_mode():
    wanted = Pooled().eval()(ids, torch.ones_like(ids)).numpy()
session = onnxruntime.InferenceSession(str(folder / "fp32.onnx"), providers=["CPUExecutionProvider"])
(found,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()})
least = float((found * wanted).sum(axis=1).min())
if least < 0.9999:
    sys.exit(f"the exported model is another one: cosine {least:.4f}")
quantize_dynamic(str(folder / "fp32.onnx"), str(folder / "int8.onnx"), weight_type=QuantType.QInt8)
