"""From a model's files to its spec and program: finds the family, and hands it the description to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from headrace.base.errors import ModelFormatError
from headrace.program.families.pooling import with_pooling
from headrace.program.families.registry import family_of, gguf_family, hf_family
from headrace.program.ir import Program
from headrace.program.keys import Keys, show
from headrace.program.model import Architecture, LayerSpec, ModelSpec, RopeKind, RopeSpec
from headrace.program.tensors import TensorLike

__all__ = [
    "Architecture",
    "LayerSpec",
    "ModelSpec",
    "RopeKind",
    "RopeSpec",
    "build_program",
    "spec_from_config",
    "spec_from_files",
    "spec_from_gguf",
]


class ModelFilesLike(Protocol):
    """The part of ``registry``'s ModelFiles that is read here."""

    @property
    def kind(self) -> str:
        """``gguf`` or ``safetensors``."""

    @property
    def config(self) -> Mapping[str, object]:
        """config.json."""

    @property
    def generation_config(self) -> Mapping[str, object]:
        """generation_config.json, empty when absent."""

    @property
    def pooling(self) -> Mapping[str, object]:
        """The sentence-transformers pooling of the folder, empty when absent."""

    @property
    def metadata(self) -> Mapping[str, object]:
        """GGUF metadata."""

    @property
    def tensors(self) -> Mapping[str, TensorLike]:
        """By source name."""


def spec_from_config(config: Mapping[str, object], generation_config: Mapping[str, object] | None = None) -> ModelSpec:
    """Returns the spec of a ``config.json``.

    Args:
        generation_config: end-of-sequence ids of ``generation_config.json`` are added to the config's own.

    Raises:
        ModelFormatError: a value has the wrong type, is out of range, or contradicts another; names key, value, limit.
        ModelUnsupportedError: the native engine has no program for this architecture or variant.
    """
    keys = Keys("config.json", config)
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelFormatError(
            f"config.json: architectures is {show(names)}, must be a list that starts with the model's class, "
            'e.g. ["LlamaForCausalLM"]'
        )
    family = hf_family(keys.source, names[0])
    return family.spec_from_config(names[0], keys, Keys("generation_config.json", generation_config or {}))


def spec_from_gguf(metadata: Mapping[str, object], tensors: Mapping[str, TensorLike]) -> ModelSpec:
    """Returns the spec of a GGUF file. ``tensors``: by name, for shapes and the values of ``rope_freqs.weight``.

    Raises:
        ModelFormatError, ModelUnsupportedError: as ``spec_from_config``.
    """
    keys = Keys("GGUF metadata", metadata)
    return gguf_family(keys.source, keys.text("general.architecture")).spec_from_gguf(keys, tensors)


def spec_from_files(files: ModelFilesLike) -> ModelSpec:
    """Returns the spec of an opened model, whichever its format; raises as ``spec_from_config``."""
    if files.kind == "gguf":
        return spec_from_gguf(files.metadata, files.tensors)
    spec = spec_from_config(files.config, files.generation_config)
    if spec.has_masked_head and (files.pooling or not _has_masked_head(spec, files)):
        spec = replace(spec, has_masked_head=False)
    return with_pooling(spec, Keys("pooling configuration", files.pooling)) if files.pooling else spec


def _has_masked_head(spec: ModelSpec, files: ModelFilesLike) -> bool:
    """Whether the head's weights are there: files of embedding models often keep the name of the class without them."""
    return any(source.name in files.tensors for source in family_of(spec).sources(spec, "mask_dense", files.kind))


def build_program(spec: ModelSpec) -> Program:
    """Returns the program of the spec's family."""
    return family_of(spec).build(spec)
