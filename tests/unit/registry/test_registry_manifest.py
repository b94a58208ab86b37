"""The manifest: what counts as untouched, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.base.errors import ModelFormatError, ModelIntegrityError
from headrace.registry.manifest import MANIFEST_NAME, read_manifest, verify_all, verify_changed, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.json", "b.gguf"):
        (folder / name).write_bytes(name.encode() * 100)
    write_manifest(folder, source="hf:org/name", revision="abc")
    return folder


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def age_manifest(folder: Path) -> None:
    """Makes the manifest an hour younger than the files, so that their traits alone can be trusted."""
    found = (folder / MANIFEST_NAME).stat()
    os.utime(folder / MANIFEST_NAME, ns=(found.st_atime_ns, found.st_mtime_ns + 3600 * 10**9))


def test_an_untouched_folder_passes_with_one_digest(folder: Path) -> None:
    assert verify_changed(folder) == verify_all(folder).digest == read_manifest(folder).digest


@pytest.mark.parametrize("bit", [0, 777, 4799])
def test_a_flipped_bit_is_refused(folder: Path, bit: int) -> None:
    flip(folder / "a.json", bit)

    with pytest.raises(ModelIntegrityError, match=r"a\.json: has SHA-256"):
        verify_changed(folder)


def test_a_flip_with_the_old_mtime_is_refused_too(folder: Path) -> None:
    age_manifest(folder)
    before = (folder / "b.gguf").stat()
    flip(folder / "b.gguf", 9)
    os.utime(folder / "b.gguf", ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(ModelIntegrityError, match=r"b\.gguf"):
        verify_changed(folder)


def test_touched_but_equal_files_pass_and_are_noted(folder: Path) -> None:
    os.utime(folder / "a.json", ns=(1, 1))

    verify_changed(folder)

    assert read_manifest(folder).files["a.json"].mtime_ns == 1


def test_missing_and_unnamed_files_are_listed(folder: Path) -> None:
    (folder / "a.json").rename(folder / "c.json")

    with pytest.raises(ModelIntegrityError, match=r"missing: 'a\.json'; not in the manifest: 'c\.json'"):
        verify_changed(folder)


def test_a_link_in_place_of_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "a.json").rename(tmp_path / "a.json")
    (folder / "a.json").symlink_to(tmp_path / "a.json")

    with pytest.raises(ModelFormatError, match="symbolic link"):
        verify_changed(folder)


@pytest.mark.parametrize("part", ["sha256", "digest"])
def test_a_changed_hash_in_the_manifest_is_found(folder: Path, part: str) -> None:
    text = (folder / MANIFEST_NAME).read_text()
    at = text.index(f'"{part}": "') + len(part) + 6
    other = "0" if text[at] != "0" else "1"
    (folder / MANIFEST_NAME).write_text(text[:at] + other + text[at + 1 :])

    with pytest.raises(ModelIntegrityError, match="damaged"):
        verify_changed(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": 3}', "\0" * 50])
def test_a_broken_manifest_is_refused(folder: Path, content: str) -> None:
    (folder / MANIFEST_NAME).write_text(content)

    with pytest.raises(ModelIntegrityError, match="damaged"):
        verify_changed(folder)


@pytest.mark.parametrize("name", ["../a.json", "/etc/passwd", "x/../../a", ".bashrc", "a\\\\b"])
def test_names_that_leave_the_folder_are_refused(folder: Path, name: str) -> None:
    text = (folder / MANIFEST_NAME).read_text()
    (folder / MANIFEST_NAME).write_text(text.replace('"a.json"', f'"{name}"'))

    with pytest.raises(ModelIntegrityError, match="not a plain name"):
        read_manifest(folder)
