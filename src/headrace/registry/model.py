"""Opens a local model, folder or file: which files make it up, their checked headers, and its digest.

Nothing is executed and nothing is unpickled; weights stay memory maps. A folder with a manifest is checked
against it first, so bytes that are not the ones pulled are refused before they are parsed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.registry.files import map_file, read_small, regular_size, sha256_of, shown
from headrace.registry.formats.gguf import parse_gguf
from headrace.registry.formats.gguf_split import join_parts, part_names
from headrace.registry.formats.gguf_vocabulary import check_vocabulary
from headrace.registry.formats.json_text import parse_json
from headrace.registry.formats.packed_linear import LEGACY_CONFIGS, fold_linears, read_packed_config
from headrace.registry.formats.safetensors import parse_safetensors
from headrace.registry.formats.tensor import TensorView
from headrace.registry.manifest import MANIFEST_NAME, verify_changed
from headrace.registry.sentence import read_pooling

TOKENIZER_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
_INDEX_NAME = "model.safetensors.index.json"
_MAX_JSON_BYTES = 16 * 2**20
_MAX_TOKENIZER_BYTES = 256 * 2**20
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# 4 KiB pages of the data, evenly spaced, that go into the digest of a model without manifest: cheap, and two
# fine-tunes of one model differ nearly everywhere.
_DIGEST_PAGES = 64


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model.

    Args:
        kind: ``safetensors`` or ``gguf``.
        folder: where the files lie.
        weights: the weight files, in order.
        config: config.json; empty for GGUF.
        metadata: GGUF key-value pairs; empty else.
        generation_config: generation_config.json; empty where there is none.
        pooling: configuration of the sentence-transformers pooling module; empty where there is none.
        tensors: every stored tensor by its own name.
        tokenizer_files: those of ``TOKENIZER_NAMES`` that exist.
        digest: hex; equal for equal content, cheap to compute. The manifest's where there is one.
    """

    kind: str
    folder: Path
    weights: tuple[Path, ...]
    config: dict[str, Any]
    metadata: dict[str, Any]
    generation_config: dict[str, Any]
    pooling: dict[str, Any]
    tensors: dict[str, TensorView]
    tokenizer_files: dict[str, Path]
    digest: str


def open_model(path: Path, *, has_vocabulary: bool = True) -> ModelFiles:
    """Returns the model at ``path``: a folder, or one .gguf or .safetensors file; any part names a split GGUF.

    Args:
        has_vocabulary: False leaves the tokenizer's arrays out of GGUF metadata, unread and unchecked: quicker, for
            those who never see text.

    Raises:
        ModelFormatError: missing, ambiguous, not a regular file, or a header that lies.
        ModelIntegrityError: the folder's manifest names other bytes.
        ModelUnsupportedError: pickle weights only, or code in the model.

    Cost: headers only; hashes files that changed since the manifest was last checked (about 1 GB/s).
    """
    folder, weights = _weights_of(path)
    has_manifest = os.path.lexists(folder / MANIFEST_NAME)
    manifest_digest = verify_changed(folder) if has_manifest else None
    maps = {file: _map_weights(file) for file in weights}
    is_gguf = bytes(maps[weights[0]][:4]) == b"GGUF"
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorView] = {}
    if is_gguf:
        parts = {file: parse_gguf(data, file, has_vocabulary=has_vocabulary) for file, data in maps.items()}
        metadata, tensors = join_parts(parts)
        if has_vocabulary:
            check_vocabulary(metadata, weights[0])
    else:
        tensors = _join_shards({file: parse_safetensors(data, file) for file, data in maps.items()}, folder)
    if not tensors:
        raise ModelFormatError(f"{weights[0]}: holds no tensors")
    config = {} if is_gguf else _read_object(folder / "config.json")
    packing = None if is_gguf else _packing(folder, config)
    if not is_gguf:
        tensors = fold_linears(tensors, packing and read_packed_config(*packing), folder)
    if "auto_map" in config:
        raise ModelUnsupportedError(f"{folder / 'config.json'}: the model brings its own code (auto_map); none is run")
    # A GGUF carries its tokenizer; files that happen to lie beside it belong to something else.
    generation = folder / "generation_config.json"
    has_generation = not is_gguf and generation.exists()
    tokenizer_files = {} if is_gguf else _tokenizer_files(folder)
    texts = [] if is_gguf else [folder / "config.json", *tokenizer_files.values()]
    if packing is not None and packing[1] not in texts:
        texts.append(packing[1])
    return ModelFiles(
        kind="gguf" if is_gguf else "safetensors",
        folder=folder,
        weights=weights,
        config=config,
        metadata=metadata,
        generation_config=_read_object(generation) if has_generation else {},
        pooling={} if is_gguf else read_pooling(folder, _read_json),
        tensors=tensors,
        tokenizer_files=tokenizer_files,
        digest=manifest_digest or _digest(texts, maps),
    )


def _weights_of(path: Path) -> tuple[Path, tuple[Path, ...]]:
    """Returns the model's folder and its weight files."""
    try:
        if not path.is_dir():
            path.lstat()
            return path.parent, tuple(path.parent / name for name in _all_parts(path.parent, path.name))
        names = sorted(entry.name for entry in path.iterdir())
    except FileNotFoundError as error:
        raise ModelFormatError(f"{path}: there is no such file or folder") from error
    except OSError as error:
        raise ModelFormatError(f"{str(path)[:200]}: cannot be read: {error.strerror}") from error
    gguf = [name for name in names if name.endswith(".gguf")]
    safetensors = [name for name in names if name.endswith(".safetensors")]
    if _INDEX_NAME in names:
        return path, tuple(path / name for name in _indexed_shards(path, safetensors))
    if "model.safetensors" in names:
        return path, (path / "model.safetensors",)
    shards = [name for name in safetensors if _SHARD.fullmatch(name)]
    if shards:
        raise ModelFormatError(f"{path}: has {len(shards)} shards but no {_INDEX_NAME}, which must name them")
    for found in (safetensors, gguf):
        if len(found) == 1 or (found and set(part_names(found[0])) >= set(found)):
            return path, tuple(path / name for name in _all_parts(path, found[0]))
        if found:
            raise ModelFormatError(f"{path}: has several models ({', '.join(found[:8])}): give the path of one file")
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        raise ModelUnsupportedError(
            f"{path}: has only pickle weights ({', '.join(pickles[:4])}), which can run code and are never read: "
            "convert them to safetensors once, where you trust them (docs/guides/encoders.md, Pickle)"
        )
    raise ModelFormatError(f"{path}: has neither a .safetensors nor a .gguf file")


def _all_parts(folder: Path, name: str) -> list[str]:
    names = part_names(name)
    missing = [part for part in names if not os.path.lexists(folder / part)]
    if missing and missing != [name]:
        raise ModelFormatError(f"{folder / name}: of its {len(names)} parts these are missing: {_some(missing)}")
    return names


def _indexed_shards(folder: Path, present: list[str]) -> list[str]:
    wanted = sorted(set(_weight_map(folder).values()))
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelFormatError(f"{folder / _INDEX_NAME}: these shards are missing: {', '.join(missing[:8])}")
    extra = [name for name in present if name not in wanted and _SHARD.fullmatch(name)]
    if extra:
        raise ModelFormatError(f"{folder / _INDEX_NAME}: does not name these shards: {', '.join(extra[:8])}")
    return wanted


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / _INDEX_NAME
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{path}: weight_map should be an object of tensor names to file names")
    for name, file in weight_map.items():
        is_plain = isinstance(file, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", file)
        if not is_plain:
            raise ModelFormatError(
                f"{path}: tensor {shown(name)} is said to lie in {shown(str(file))}, "
                "which is not a plain .safetensors name inside the folder"
            )
    return weight_map


def _join_shards(shards: Mapping[Path, dict[str, TensorView]], folder: Path) -> dict[str, TensorView]:
    tensors: dict[str, TensorView] = {}
    for file, held in shards.items():
        twice = sorted(held.keys() & tensors.keys())
        if twice:
            raise ModelFormatError(f"{file}: these tensors are in another shard too: {_some(twice)}")
        tensors |= held
    if (folder / _INDEX_NAME).exists() and len(shards) > 0:
        weight_map = _weight_map(folder)
        if set(shards) == {folder / name for name in weight_map.values()}:
            wrong = [name for name, file in weight_map.items() if name not in shards[folder / file]]
            unnamed = sorted(tensors.keys() - weight_map.keys())
            if wrong:
                raise ModelFormatError(f"{folder / _INDEX_NAME}: not in the shards named for them: {_some(wrong)}")
            if unnamed:
                raise ModelFormatError(f"{folder / _INDEX_NAME}: does not name these tensors: {_some(unnamed)}")
    return tensors


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(shown(name) for name in names[:8]) + more


def _packing(folder: Path, config: Mapping[str, Any]) -> tuple[Any, Path] | None:
    """Returns what says how matrices are packed, and the file it stands in."""
    if config.get("quantization_config") is not None:
        return config["quantization_config"], folder / "config.json"
    for name in LEGACY_CONFIGS:
        if os.path.lexists(folder / name):
            return _read_object(folder / name), folder / name
    return None


def _map_weights(path: Path) -> memoryview:
    """Maps a weight file after a look at its first bytes: what it is decides, not what it is called."""
    data = map_file(path)
    head = bytes(data[:9])
    if head[:4] == b"GGUF" or head[8:9] == b"{":
        return data
    if head[:2] == b"PK":
        raise ModelUnsupportedError(f"{path}: is a zip archive (a pickle checkpoint?), which is never read")
    if head[:1] == b"\x80" and head[1:2] <= b"\x05":
        raise ModelUnsupportedError(f"{path}: is a pickle, which can run code and is never read")
    raise ModelFormatError(f"{path}: is neither GGUF nor safetensors (starts with {head!r})")


def _read_json(path: Path) -> object:
    return parse_json(read_small(path, _MAX_JSON_BYTES), path, max_containers=65_536, max_items=2**20)


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: should hold a JSON object, found {type(value).__name__}")
    return value


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name in TOKENIZER_NAMES:
        path = folder / name
        if not path.exists() and not path.is_symlink():
            continue
        size_bytes = regular_size(path)
        if size_bytes > _MAX_TOKENIZER_BYTES:
            raise ModelFormatError(f"{path}: has {size_bytes} bytes, the limit is {_MAX_TOKENIZER_BYTES}")
        found[name] = path
    return found


def _digest(texts: list[Path], maps: Mapping[Path, memoryview]) -> str:
    sha = hashlib.sha256()
    for path in texts:
        sha.update(f"{path.name} {sha256_of(path)}\n".encode())
    for path, data in maps.items():
        sha.update(f"{path.name} {len(data)}\n".encode())
        step = max(4096, len(data) // _DIGEST_PAGES // 4096 * 4096)
        for start in range(0, len(data), step):
            sha.update(data[start : start + 4096].tobytes())
        sha.update(data[-4096:].tobytes())
    return sha.hexdigest()
