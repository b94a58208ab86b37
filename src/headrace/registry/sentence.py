"""How a model's rows become one vector, by the files of sentence-transformers: modules.json and what it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.base.errors import ModelFormatError, ModelUnsupportedError

MODULES_NAME = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")


def read_pooling(folder: Path, read_json: Callable[[Path], object]) -> dict[str, Any]:
    """Returns the pooling module's configuration; empty where the folder has no modules.json, or none in it.

    Raises:
        ModelFormatError: modules.json is no list of modules, or names a path outside the folder.
        ModelUnsupportedError: a module that changes the vector further, e.g. Dense.
    """
    path = folder / MODULES_NAME
    if not path.exists():
        return {}
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFormatError(f"{path}: should hold a list of modules")
    found: dict[str, Any] = {}
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _KNOWN:
            raise ModelUnsupportedError(
                f"{path}: module {kind[:60]!r} is not computed by this engine, which has {', '.join(_KNOWN)}"
            )
        if kind != "Pooling":
            continue
        name = module.get("path")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}", name):
            raise ModelFormatError(f"{path}: the path of the Pooling module should be the name of a folder beside it")
        config = read_json(folder / name / "config.json")
        if not isinstance(config, dict):
            raise ModelFormatError(f"{folder / name / 'config.json'}: should hold a JSON object")
        found = config
    return found
