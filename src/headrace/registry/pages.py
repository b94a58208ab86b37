"""Giving back the pages of a mapped file, for those who have copied what they hold."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray


def release_pages(data: NDArray[np.uint8]) -> None:
    """Tells the kernel that this part of a map is not needed now; it is read anew from the file if it is after all.

    Keeps a process that has copied its weights from being charged for them twice. No effect on other arrays.
    """
    whole = data if data.base is None or not isinstance(data.base, np.ndarray) else data.base
    mapped: object = whole.base
    # numpy keeps a memoryview between an array and the object it was made from.
    mapped = mapped.obj if isinstance(mapped, memoryview) else mapped
    if not isinstance(mapped, mmap.mmap):
        return
    page = mmap.PAGESIZE
    # The array may begin anywhere in the map, whose own beginning is on a page.
    offset = data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    start, stop = offset + -offset % page, (offset + data.nbytes) // page * page
    if stop > start:
        mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
