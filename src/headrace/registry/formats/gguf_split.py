"""GGUF models in several files, as ``gguf-split`` writes them: ``NAME-00001-of-00003.gguf`` and its siblings.

The first part carries all metadata; every part says its number, how many there are, and how many tensors the whole has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFormatError
from headrace.registry.files import shown
from headrace.registry.formats.gguf import GgufFile
from headrace.registry.formats.tensor import TensorView

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS = 1024


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of the model that ``name`` is one of; ``[name]`` where it is whole by its name.

    Raises:
        ModelFormatError: the numbers in the name cannot be.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return [name]
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ModelFormatError(f"{shown(name)}: its name says part {number} of {count}, the limit is {MAX_PARTS} parts")
    return [f"{match[1]}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def join_parts(parts: Mapping[Path, GgufFile]) -> tuple[dict[str, Any], dict[str, TensorView]]:
    """Returns metadata and tensors of a model that lies in ``parts``, in order; one part is a whole model.

    Raises:
        ModelFormatError: a part is not what its place says, or two hold the same tensor.
    """
    files = list(parts)
    metadata = parts[files[0]].metadata
    architecture = metadata.get("general.architecture")
    tensors: dict[str, TensorView] = {}
    for index, (file, part) in enumerate(parts.items()):
        number, count = _whole(part, _NUMBER, file, 0), _whole(part, _COUNT, file, 1)
        # Writers of whole files leave the keys out, or say part 0 of 0 or 1.
        if max(count, 1) != len(files) or number != index:
            why = "the parts are mixed up" if len(files) > 1 else "keep the names NAME-00001-of-0000N.gguf"
            raise ModelFormatError(
                f"{file}: says that it is part {number + 1} of {count}, and is read as part {index + 1} of "
                f"{len(files)}: {why}"
            )
        # gguf-split leaves the architecture out of later parts; where it stands it must agree.
        if part.metadata.get("general.architecture", architecture) != architecture:
            raise ModelFormatError(f"{file}: is a part of another model than {files[0].name}")
        twice = sorted(part.tensors.keys() & tensors.keys())
        if twice:
            raise ModelFormatError(f"{file}: the tensor {shown(twice[0])} is in another part too")
        tensors |= part.tensors
    for file, part in parts.items():
        total = _whole(part, _TENSORS, file, len(tensors))
        if total != len(tensors):
            raise ModelFormatError(f"{file}: says that all parts hold {total} tensors, they hold {len(tensors)}")
    return metadata, tensors


def _whole(part: GgufFile, key: str, file: Path, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ModelFormatError(f"{file}: {key} is {shown(str(value), 40)}, it should be a whole number from 0")
    return value
