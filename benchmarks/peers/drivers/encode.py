"""MiniLM in one of the peers: encode.py ENGINE FOLDER. Token ids go in, pooled vectors come out.

ENGINE: torch-fp32, torch-bf16, onnxruntime-fp32, onnxruntime-int8, openvino-fp32, openvino-bf16, ctranslate2-fp32,
ctranslate2-int8. Each runs in its own environment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import wire

Encode = Callable[[Any], Any]
WARM_RUNS, LEAST_RUNS = 2, 5


def with_torch(folder: Path, precision: str) -> Encode:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(wire.threads())
    model = SentenceTransformer(str(folder), device="cpu")
    if precision == "bf16":
        model = model.bfloat16()

    def encode(ids: Any) -> Any:
        given = torch.from_numpy(ids)
        with torch.inference_mode():
            return model({"input_ids": given, "attention_mask": torch.ones_like(given)})["sentence_embedding"].float()

    return encode


def with_onnxruntime(folder: Path, precision: str) -> Encode:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = wire.threads()
    path = str(folder / f"{precision}.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]


def with_openvino(folder: Path, precision: str) -> Encode:
    import openvino

    model = openvino.Core().read_model(str(folder / "openvino_model.xml"))
    names = [port.get_any_name() for port in model.inputs]
    hints = {
        "INFERENCE_PRECISION_HINT": "f32" if precision == "fp32" else precision,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": wire.threads(),
    }
    request = openvino.Core().compile_model(model, "CPU", hints).create_infer_request()

    def encode(ids: Any) -> Any:
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        hidden = request.infer({name: given[name] for name in names})[0]
        return hidden.mean(axis=1)

    return encode


def with_ctranslate2(folder: Path, precision: str) -> Encode:
    import ctranslate2

    kind = "float32" if precision == "fp32" else precision
    encoder = ctranslate2.Encoder(str(folder), device="cpu", compute_type=kind, intra_threads=wire.threads())
    return lambda ids: np.array(encoder.forward_batch(ids.tolist()).last_hidden_state).mean(axis=1)


engine, precision = sys.argv[1].split("-")
encode = {
    "torch": with_torch,
    "onnxruntime": with_onnxruntime,
    "openvino": with_openvino,
    "ctranslate2": with_ctranslate2,
}[engine](Path(sys.argv[2]), precision)


def measure(texts: int, tokens: int, seconds: float) -> wire.Answer:
    """Times runs of one batch for `seconds`; the median stands for all."""
    ids = np.array(wire.prompts(texts, tokens, wire.ENCODER_FIRST_ID, wire.ENCODER_LAST_ID), dtype=np.int64)
    for _ in range(WARM_RUNS):
        encode(ids)
    times: list[float] = []
    while len(times) < LEAST_RUNS or sum(times) < seconds:
        started_at_s = time.perf_counter()
        encode(ids)
        times.append(time.perf_counter() - started_at_s)
    return {"tokens": texts, "seconds": float(np.median(times))}


def vectors(ids: str, out: str) -> wire.Answer:
    """Writes the unit vectors of an .npy array of ids [N, T] as [N, E] float32."""
    found = np.concatenate([np.asarray(encode(row[None, :]), dtype=np.float32) for row in np.load(ids)])
    np.save(out, found / np.linalg.norm(found, axis=1, keepdims=True))
    return {"texts": len(found)}


encode(np.array(wire.prompts(1, 8, wire.ENCODER_FIRST_ID, wire.ENCODER_LAST_ID), dtype=np.int64))
wire.serve({"encode": measure, "vectors": vectors})
