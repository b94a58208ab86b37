"""A mapped file moves into memory under the eyes of its readers: same address, same bytes, no file behind it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.engine.mapped import MappedBytes

MIB = 2**20


def write(path: Path, size: int) -> np.ndarray:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    path.write_bytes(bytes(4096) + data.tobytes())
    return data


def map_file(path: Path, size: int) -> MappedBytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return MappedBytes(fd, 4096, size)
    finally:
        os.close(fd)


def maps_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("size", [1, 4096, 2 * MIB - 1, 2 * MIB, 40 * MIB + 12_345])
def test_bytes_are_the_files_before_and_after_they_moved(tmp_path: Path, size: int) -> None:
    expected = write(tmp_path / "f", size)
    mapped = map_file(tmp_path / "f", size)
    view = mapped.view()
    address = view.ctypes.data

    before = np.array_equal(view, expected)
    mapped.settle()

    assert before
    assert np.array_equal(view, expected)
    assert view.ctypes.data == address
    assert address % (2 * MIB) == 0


def test_moved_bytes_do_not_follow_the_file(tmp_path: Path) -> None:
    expected = write(tmp_path / "f", 4 * MIB)
    mapped = map_file(tmp_path / "f", 4 * MIB)
    view = mapped.view()

    mapped.settle()
    with (tmp_path / "f").open("r+b") as file:
        file.write(b"\xff" * 5 * MIB)

    assert np.array_equal(view, expected)
    assert maps_of(tmp_path / "f") == 0


def test_readers_see_the_same_bytes_while_they_move(tmp_path: Path) -> None:
    size = 64 * MIB
    expected = write(tmp_path / "f", size)
    total = int(expected.sum(dtype=np.uint64))
    mapped = map_file(tmp_path / "f", size)
    view = mapped.view()
    sums: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set() or not sums:
            sums.append(int(view.sum(dtype=np.uint64)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    mapped.settle()
    is_over.set()
    for reader in readers:
        reader.join()

    assert set(sums) == {total}


def test_the_map_lives_as_long_as_a_slice_of_it_and_no_longer(tmp_path: Path) -> None:
    write(tmp_path / "f", 4096)
    part = map_file(tmp_path / "f", 4096).view()[100:200]
    gc.collect()
    while_held = maps_of(tmp_path / "f")

    del part
    gc.collect()

    assert while_held == 1
    assert maps_of(tmp_path / "f") == 0


def test_nobody_writes_into_the_map(tmp_path: Path) -> None:
    write(tmp_path / "f", 4096)

    assert not map_file(tmp_path / "f", 4096).view().flags.writeable
