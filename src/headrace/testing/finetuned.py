"""Fine-tuned models as what they add to a published one: low-rank changes of its matrices, and a head.

A file of a few hundred kB then stands for a model of 90 MB that a test can build: the base comes from the user's cache.
Source: Hu et al., LoRA (arXiv 2106.09685). ``scripts/encoder-training`` makes such files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.registry.model import TOKENIZER_NAMES, open_model
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

Arrays = Mapping[str, npt.NDArray[Any]]
_OUT, _IN = ".lora_out", ".lora_in"


def write_finetuned(base: Path, change: Arrays, folder: Path) -> Path:
    """Writes the fine-tuned model as transformers lays out a BertForSequenceClassification; returns ``folder``.

    Args:
        base: folder of the BertModel that was fine-tuned, stored in f32.
        change: ``labels``, names of the classes; ``NAME.lora_out`` [n, r] and ``NAME.lora_in`` [r, k] f16, whose
            product is added to the matrix NAME of the base; ``classifier.weight`` and ``classifier.bias`` as they are.
    """
    model = open_model(base)
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, view in model.tensors.items():
        if name == "embeddings.position_ids":
            continue  # 0, 1, 2 …: no weight
        assert view.dtype == "F32", f"{name} is {view.dtype}"
        weights[f"bert.{name}"] = np.frombuffer(view.data.tobytes(), "<f4").reshape(view.shape)
    for key in change:
        if key.endswith(_OUT):
            name = key.removesuffix(_OUT)
            out, inner = change[key].astype(np.float32), change[name + _IN].astype(np.float32)
            weights[f"bert.{name}"] = weights[f"bert.{name}"] + out @ inner
    for name in ("classifier.weight", "classifier.bias"):
        weights[name] = change[name].astype(np.float32)
    folder.mkdir(parents=True)
    stored = {name: Encoded("F32", value.shape, value.tobytes()) for name, value in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored, {"format": "pt"}))
    labels = {str(index): label for index, label in enumerate(change["labels"].tolist())}
    config = {
        **model.config,
        "architectures": ["BertForSequenceClassification"],
        "id2label": labels,
        "label2id": {label: int(index) for index, label in labels.items()},
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_NAMES:
        if name in model.tokenizer_files:
            (folder / name).write_bytes(model.tokenizer_files[name].read_bytes())
    return folder
