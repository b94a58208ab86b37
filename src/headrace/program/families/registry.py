"""Which family runs which model: by entry of ``architectures`` in config.json, and by ``general.architecture`` in GGUF.

A new family is one file beside this one and its rows here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from headrace.base.errors import ModelUnsupportedError
from headrace.program.families import (
    albert,
    bert,
    gemma2,
    gemma3,
    gpt2,
    granite,
    llama,
    mixtral,
    modernbert,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from headrace.program.families.source import Source
from headrace.program.ir import Program
from headrace.program.keys import Keys, show
from headrace.program.model import ModelSpec
from headrace.program.tensors import TensorLike


class Family(Protocol):
    """What a family's file offers (a module is one)."""

    NAME: str

    def spec_from_config(self, architecture: str, keys: Keys, generation: Keys) -> ModelSpec:
        """Returns the spec of a config.json."""

    def spec_from_gguf(self, keys: Keys, tensors: Mapping[str, TensorLike]) -> ModelSpec:
        """Returns the spec of GGUF metadata."""

    def build(self, spec: ModelSpec) -> Program:
        """Returns the program of one step."""

    def sources(self, spec: ModelSpec, role: str, kind: str) -> tuple[Source, ...]:
        """Returns where a file of kind ``hf`` or ``gguf`` may keep ``role``; the first place that is there counts."""


HF_FAMILIES: dict[str, Family] = {
    "AlbertForMaskedLM": albert,
    "AlbertForSequenceClassification": albert,
    "AlbertForTokenClassification": albert,
    "AlbertModel": albert,
    "BertForMaskedLM": bert,
    "BertForSequenceClassification": bert,
    "BertForTokenClassification": bert,
    "BertModel": bert,
    "DistilBertForMaskedLM": bert,
    "DistilBertForSequenceClassification": bert,
    "DistilBertForTokenClassification": bert,
    "DistilBertModel": bert,
    "GPT2LMHeadModel": gpt2,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3,
    "GraniteForCausalLM": granite,
    "LlamaForCausalLM": llama,
    "Mistral3ForConditionalGeneration": llama,
    "MistralForCausalLM": llama,
    "MixtralForCausalLM": mixtral,
    "ModernBertForMaskedLM": modernbert,
    "ModernBertForSequenceClassification": modernbert,
    "ModernBertForTokenClassification": modernbert,
    "ModernBertModel": modernbert,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "RobertaForMaskedLM": bert,
    "RobertaForSequenceClassification": bert,
    "RobertaForTokenClassification": bert,
    "RobertaModel": bert,
    "SmolLM3ForCausalLM": smollm3,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "XLMRobertaForMaskedLM": bert,
    "XLMRobertaForSequenceClassification": bert,
    "XLMRobertaForTokenClassification": bert,
    "XLMRobertaModel": bert,
}
GGUF_FAMILIES: dict[str, Family] = {
    "bert": bert,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "granite": granite,
    "llama": llama,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3_moe,
    "smollm3": smollm3,
    "stablelm": stablelm,
    "starcoder2": starcoder2,
}
FAMILIES: dict[str, Family] = {family.NAME: family for family in (*HF_FAMILIES.values(), *GGUF_FAMILIES.values())}


def hf_family(source: str, architecture: str) -> Family:
    """Returns the family of an HF architecture name.

    Raises:
        ModelUnsupportedError: none runs it; the message says what is missing and what may run it.
    """
    return _find(HF_FAMILIES, source, architecture)


def gguf_family(source: str, architecture: str) -> Family:
    """Returns the family of a GGUF architecture name; raises as ``hf_family``."""
    return _find(GGUF_FAMILIES, source, architecture)


def family_of(spec: ModelSpec) -> Family:
    """Returns the family that made ``spec``."""
    return FAMILIES[spec.family]


def _find(table: dict[str, Family], source: str, architecture: str) -> Family:
    if (family := table.get(architecture)) is None:
        known = ", ".join(sorted({family.NAME for family in table.values()}))
        raise ModelUnsupportedError(
            f"{source}: no program is written for architecture {show(architecture)}; the native engine has the "
            f"families {known}: `--engine vllm` may run it",
            hint="--engine vllm may run this model",
        )
    return family
