"""What ``program`` needs to know of a source tensor: its shape, and for a few tiny ones their values."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from headrace.base.errors import ModelFormatError


class TensorLike(Protocol):
    """The part of ``registry``'s TensorView that is read here."""

    @property
    def dtype(self) -> str:
        """Name of the element type, e.g. ``F32``."""

    @property
    def shape(self) -> Sequence[int]:
        """Row-major, [out, in]."""

    @property
    def raw(self) -> memoryview:
        """The tensor's bytes."""


def tensor_f32(source: str, name: str, tensor: TensorLike, count: int) -> tuple[float, ...]:
    """Returns a small F32 vector of exactly ``count`` elements.

    Raises:
        ModelFormatError: another type, shape or size.
    """
    if tensor.dtype != "F32" or tuple(tensor.shape) != (count,) or tensor.raw.nbytes != 4 * count:
        raise ModelFormatError(
            f"{source}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected F32 of shape ({count},)"
        )
    return struct.unpack(f"<{count}f", tensor.raw)
