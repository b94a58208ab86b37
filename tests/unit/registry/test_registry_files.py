"""Memory maps: pages that were given back come back with the same content."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ModelFormatError
from headrace.registry.files import map_file
from headrace.registry.pages import release_pages


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssFile")).split()[1])


def test_released_pages_leave_the_process_and_read_the_same_again(tmp_path: Path) -> None:
    content = np.arange(32 * 2**20, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    part = np.frombuffer(map_file(tmp_path / "f")[100:-100], np.uint8)
    total = int(part.sum())
    before = resident_kib()

    release_pages(part)

    assert before - resident_kib() > 30 * 1024
    assert int(part.sum()) == total


def test_releasing_an_ordinary_array_does_nothing() -> None:
    values = np.ones(3 * mmap.PAGESIZE, np.uint8)

    release_pages(values[10:])

    assert int(values.sum()) == 3 * mmap.PAGESIZE


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()

    with pytest.raises(ModelFormatError, match="is empty"):
        map_file(tmp_path / "f")
