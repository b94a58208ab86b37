"""Split GGUF: the parts open as one model, and every way in which parts do not belong together is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFormatError, ModelUnsupportedError
from headrace.registry.formats.gguf import open_gguf
from headrace.registry.model import open_model
from headrace.registry.selection import choose_files
from headrace.testing.tiny import write_tiny_gguf
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import gguf_bytes


def names(count: int = 3) -> list[str]:
    return [f"tiny-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]


def write_split(folder: Path, change: Callable[[int, dict[str, Any]], None] = lambda index, keys: None) -> Path:
    """Writes a model in three parts, as gguf-split does: all metadata in the first one. Returns the first."""
    whole = open_gguf(write_tiny_gguf(folder / "whole" / "m.gguf"))
    tensors = list(whole.tensors.values())
    for index, name in enumerate(names()):
        keys = {"split.no": index, "split.count": 3, "split.tensors.count": len(tensors)}
        change(index, keys)
        metadata = {**whole.metadata, **keys} if index == 0 else keys
        part = {t.name: Encoded(t.dtype, t.shape, t.data.tobytes()) for t in tensors[index::3]}
        (folder / name).write_bytes(gguf_bytes(metadata, part))
    return folder / names()[0]


def test_parts_open_as_the_whole_by_folder_and_by_any_part(tmp_path: Path) -> None:
    write_split(tmp_path)
    whole = open_model(tmp_path / "whole")

    for path in (tmp_path, *(tmp_path / name for name in names())):
        files = open_model(path)
        assert [file.name for file in files.weights] == names()
        assert files.metadata["tokenizer.ggml.tokens"] == whole.metadata["tokenizer.ggml.tokens"]
        assert files.tensors.keys() == whole.tensors.keys()
        assert all(np.array_equal(files.tensors[name].data, whole.tensors[name].data) for name in files.tensors)


def test_the_digest_follows_every_part(tmp_path: Path) -> None:
    path = write_split(tmp_path)
    before = open_model(path).digest
    last = tmp_path / names()[2]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)

    assert open_model(path).digest != before


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path: Path, gone: int) -> None:
    write_split(tmp_path)
    (tmp_path / names()[gone]).unlink()

    with pytest.raises(ModelFormatError, match=f"of its 3 parts these are missing: '{names()[gone]}'"):
        open_model(tmp_path)


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    write_split(tmp_path)
    second, third = (tmp_path / name for name in names()[1:])
    second.rename(tmp_path / "x")
    third.rename(second)
    (tmp_path / "x").rename(third)

    with pytest.raises(ModelFormatError, match="is part 3 of 3, and is read as part 2 of 3: the parts are mixed up"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index, keys: keys.update({"split.count": 4}), "part 1 of 4, and is read as part 1 of 3"),
        (lambda index, keys: keys.update({"split.no": 0}), "part 1 of 3, and is read as part 2 of 3"),
        (lambda index, keys: keys.pop("split.no"), "part 1 of 3, and is read as part 2 of 3"),
        (lambda index, keys: keys.update({"split.no": "0"}), "split.no is '0', it should be a whole number"),
        (lambda index, keys: keys.update({"split.tensors.count": 7}), "say.* all parts hold 7 tensors, they hold 20"),
        (lambda index, keys: keys.update({"general.architecture": f"a{index}"}), "is a part of another model"),
    ],
    ids=["count", "number", "no_number", "text", "tensors", "architecture"],
)
def test_parts_that_contradict_each_other_are_refused(
    tmp_path: Path, change: Callable[[int, dict[str, Any]], None], words: str
) -> None:
    path = write_split(tmp_path, change)

    with pytest.raises(ModelFormatError, match=words):
        open_model(path)


def test_a_tensor_in_two_parts_is_named(tmp_path: Path) -> None:
    write_split(tmp_path)
    first, second = (open_gguf(tmp_path / name) for name in names()[:2])
    name = next(iter(first.tensors))
    tensors = {
        t.name: Encoded(t.dtype, t.shape, t.data.tobytes()) for t in (first.tensors[name], *second.tensors.values())
    }
    (tmp_path / names()[1]).write_bytes(gguf_bytes(second.metadata, tensors))

    with pytest.raises(ModelFormatError, match=f"'{name}' is in another part too"):
        open_model(tmp_path)


def test_a_renamed_part_is_not_taken_for_a_whole_model(tmp_path: Path) -> None:
    first = write_split(tmp_path)
    first.rename(tmp_path / "model.gguf")

    with pytest.raises(ModelFormatError, match=r"keep the names NAME-00001-of-0000N\.gguf"):
        open_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["m-00002-of-00001.gguf", "m-00000-of-00002.gguf", "m-00001-of-02000.gguf"])
def test_a_name_with_impossible_numbers_is_refused(tmp_path: Path, name: str) -> None:
    write_tiny_gguf(tmp_path / name)

    with pytest.raises(ModelFormatError, match="its name says part"):
        open_model(tmp_path)


def test_a_part_beside_another_model_asks_for_a_choice(tmp_path: Path) -> None:
    write_split(tmp_path)
    write_tiny_gguf(tmp_path / "other.gguf")

    with pytest.raises(ModelFormatError, match="several models"):
        open_model(tmp_path)


def test_all_parts_are_fetched(tmp_path: Path) -> None:
    present = [*names(), "config.json"]

    assert choose_files(present, "hf:a/b") == ["config.json", *names()]
    assert choose_files([*present, "other.gguf"], "hf:a/b", names()[1]) == ["config.json", *names()]
    with pytest.raises(ModelUnsupportedError, match="has 3 parts, these are missing"):
        choose_files(names()[1:], "hf:a/b")
