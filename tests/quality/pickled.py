"""Reads tensors of a ``pytorch_model.bin``, for tests only: the product never unpickles.

Nothing but the three names that a plain state dict needs can be reached from the pickle, and they stand for code
below. Only the layout that torch wrote before version 1.6 is read: three small pickles, the state dict, a list of
storages, and their data one after the other. Source: torch/serialization.py, _legacy_load.
"""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MAGIC = 0x1950A86A20F9469CFC6C
_FLOAT = "torch.FloatStorage"


class _Storage(NamedTuple):
    key: str
    size: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch", "FloatStorage"): _FLOAT,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not what a plain state dict needs")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _, size, view = pid
        if kind != "storage" or storage != _FLOAT or view is not None:
            raise pickle.UnpicklingError(f"storage {key} is not plain f32")
        return _Storage(key, size)


def read_state_dict(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the tensors by name.

    Raises:
        pickle.UnpicklingError: another layout, another type than f32, or anything but tensors.
    """
    with path.open("rb") as file:
        magic, _, _ = (_Reader(file).load() for _ in range(3))
        if magic != _MAGIC:
            raise pickle.UnpicklingError(f"{path}: not the old layout of torch")
        tensors: dict[str, _Tensor] = _Reader(file).load()
        keys: list[str] = _Reader(file).load()
        storages = {key: _read_storage(file) for key in keys}
    return {name: _array(tensor, storages) for name, tensor in tensors.items()}


def _read_storage(file: IO[bytes]) -> npt.NDArray[np.float32]:
    (size,) = struct.unpack("<q", file.read(8))
    return np.frombuffer(file.read(4 * size), "<f4")


def _array(tensor: _Tensor, storages: dict[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    rows = storages[tensor.storage.key][tensor.offset :]
    strides = tuple(4 * step for step in tensor.stride)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(rows, tensor.shape, strides))
