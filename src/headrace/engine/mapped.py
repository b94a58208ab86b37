"""Weights that lie in a file at first, and move into memory with huge pages while they are being used.

A map is there at once, but decode reads it some 7 % slower than memory with huge pages, which this kernel gives to no
file; it could also change or be cut off under our feet. So the map is only the start: ``settle`` copies a piece of it
into fresh memory and puts that in the map's place by ``mremap``, piece by piece. The kernel holds the address space
locked meanwhile, so whoever reads there waits for microseconds and finds the same bytes at the same address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

_HUGE_BYTES: Final = 2 * 2**20
# What moves at once: not too many pieces for the maps that a process may have (65,530), and short to copy.
_PIECE_BYTES: Final = 8 * _HUGE_BYTES
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedBytes:
    """A read-only part of a file, mapped at an address that huge pages can take over.

    Args:
        fd: may be closed afterwards.
        offset: where the part begins, a multiple of the page size.
        size_bytes: its length, above 0; all of it must lie in the file.

    Raises:
        OSError: the system refuses the map.
    """

    def __init__(self, fd: int, offset: int, size_bytes: int) -> None:
        assert offset % mmap.PAGESIZE == 0
        assert size_bytes > 0
        self._room_bytes = size_bytes + -size_bytes % _HUGE_BYTES + _HUGE_BYTES
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._room = _map(None, self._room_bytes, _PROT_NONE, private, -1, 0)
        self._start = self._room + -self._room % _HUGE_BYTES
        self._size_bytes = size_bytes
        try:
            _map(self._start, size_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | _MAP_FIXED, fd, offset)
        except OSError:
            _libc.munmap(self._room, self._room_bytes)
            raise

    def view(self) -> NDArray[np.uint8]:
        """Returns the bytes, uint8 [size_bytes], aligned to 2 MiB; the map lives as long as any array made of it."""
        buffer = (ctypes.c_uint8 * self._size_bytes).from_address(self._start)
        buffer.owner = self  # type: ignore[attr-defined]  # ctypes objects take any attribute
        data: NDArray[np.uint8] = np.frombuffer(memoryview(buffer), np.uint8)
        data.flags.writeable = False
        return data

    def settle(self) -> None:
        """Moves everything into memory with huge pages; may run while others read. Takes the memory that it moves into.

        Raises:
            OSError: the memory is gone; what has moved stays moved, and the rest stays mapped.
        """
        whole = self._size_bytes // _HUGE_BYTES * _HUGE_BYTES  # the rest, below 2 MiB, stays a map
        for start in range(0, whole, _PIECE_BYTES):
            size = min(_PIECE_BYTES, whole - start)
            self._settle_piece(self._start + start, size)

    def _settle_piece(self, target: int, size: int) -> None:
        room_bytes = size + _HUGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = _map(None, room_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        piece = room + -room % _HUGE_BYTES
        _libc.madvise(piece, size, mmap.MADV_HUGEPAGE)
        ctypes.memmove(piece, target, size)
        if _libc.mremap(piece, size, size, _MREMAP_MAYMOVE | _MREMAP_FIXED, target) == _FAILED:
            error = OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            _libc.munmap(room, room_bytes)
            raise error
        # Only what is left of the room: another thread may have been given the place of the piece by now.
        for start, stop in ((room, piece), (piece + size, room + room_bytes)):
            if stop > start:
                _libc.munmap(start, stop - start)

    def __del__(self) -> None:
        _libc.munmap(self._room, self._room_bytes)


def _map(address: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    found = _libc.mmap(address, size, protection, flags, fd, offset)
    if found == _FAILED or found is None:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)
