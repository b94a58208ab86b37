"""A model that is well-formed but not run is refused in one line that names what is missing and what may run it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ModelUnsupportedError
from headrace.engine.weight_plan import plan_weights
from headrace.program.spec import build_program, spec_from_files, spec_from_gguf
from headrace.registry.model import ModelFiles, open_model
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama


def changed(folder: Path, **config: Any) -> ModelFiles:
    path = write_tiny_llama(folder)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return open_model(path)


def architecture(folder: Path) -> None:
    spec_from_files(changed(folder, architectures=["RwkvForCausalLM"]))


def gguf_architecture(folder: Path) -> None:
    files = open_model(write_tiny_gguf(folder / "m.gguf"))
    spec_from_gguf({**files.metadata, "general.architecture": "rwkv"}, files.tensors)


def variant(folder: Path) -> None:
    spec_from_files(changed(folder, hidden_act="xielu"))


def stored_type(folder: Path) -> None:
    files = open_model(write_tiny_gguf(folder / "m.gguf"))
    name = "blk.0.attn_q.weight"
    tensors = {**files.tensors, name: replace(files.tensors[name], dtype="IQ4_NL")}
    plan_weights(
        replace(files, tensors=tensors), build_program(spec_from_files(files)), dtype="bf16", quantization="none"
    )


def packed_bits(folder: Path) -> None:
    spec_from_files(changed(folder, quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128}))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (architecture, "RwkvForCausalLM"),
        (gguf_architecture, "rwkv"),
        (variant, "xielu"),
        (stored_type, "IQ4_NL"),
        (packed_bits, "bits is 3"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refusal_names_what_is_missing_and_what_may_run_it(tmp_path: Path, make: Any, named: str) -> None:
    with pytest.raises(ModelUnsupportedError) as caught:
        make(tmp_path)

    assert named in caught.value.message
    assert "\n" not in caught.value.message
    assert "--engine vllm" in f"{caught.value.message} {caught.value.hint}"
