"""Opening a model: which files count, and what is refused before a header is parsed."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest

from headrace.base.errors import ModelFormatError, ModelIntegrityError, ModelUnsupportedError
from headrace.registry.formats.safetensors import open_safetensors
from headrace.registry.manifest import write_manifest
from headrace.registry.model import open_model
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import safetensors_bytes

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(folder: Path) -> dict[str, str]:
    """Splits the folder's model into two shards and returns the weight map."""
    tensors = open_safetensors(folder / "model.safetensors")
    weight_map: dict[str, str] = {}
    for name, half in ((FIRST, 0), (SECOND, 1)):
        part = [tensor for index, tensor in enumerate(tensors.values()) if index % 2 == half]
        content = safetensors_bytes({t.name: Encoded(t.dtype, t.shape, t.data.tobytes()) for t in part})
        (folder / name).write_bytes(content)
        weight_map |= {tensor.name: name for tensor in part}
    (folder / "model.safetensors").unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_folder_opens_with_config_tokenizer_and_tensors(tmp_path: Path) -> None:
    files = open_model(write_tiny_llama(tmp_path / "m"))

    assert files.kind == "safetensors"
    assert files.config["model_type"] == "llama"
    assert files.generation_config["eos_token_id"] == 2
    assert sorted(files.tokenizer_files) == ["tokenizer.json", "tokenizer_config.json"]
    assert len(files.tensors) == 20


def test_a_gguf_opens_as_file_and_as_folder_alike(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m" / "tiny.gguf")

    by_file, by_folder = open_model(path), open_model(path.parent)

    assert by_file.kind == by_folder.kind == "gguf"
    assert by_file.digest == by_folder.digest
    assert by_file.metadata["general.architecture"] == "llama"


def test_the_digest_follows_content_not_place(tmp_path: Path) -> None:
    digests = [
        open_model(write_tiny_llama(tmp_path / "a")).digest,
        open_model(write_tiny_llama(tmp_path / "b")).digest,
        open_model(write_tiny_llama(tmp_path / "c", seed=1)).digest,
    ]

    assert digests[0] == digests[1] != digests[2]


def test_shards_open_like_one_file(tmp_path: Path) -> None:
    whole = open_model(write_tiny_llama(tmp_path / "a"))
    shard(write_tiny_llama(tmp_path / "b"))

    files = open_model(tmp_path / "b")

    assert files.tensors.keys() == whole.tensors.keys()
    assert [path.name for path in files.weights] == [FIRST, SECOND]


@pytest.mark.parametrize("where", ["../other.safetensors", "/etc/passwd", ".x.safetensors", "a/b.safetensors", 7])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, where: object) -> None:
    weight_map = shard(write_tiny_llama(tmp_path / "m"))
    write_index(tmp_path / "m", {**weight_map, "lm_head.weight": where})

    with pytest.raises(ModelFormatError, match="not a plain"):
        open_model(tmp_path / "m")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(write_tiny_llama(tmp_path / "m"))
    (tmp_path / "m" / SECOND).unlink()

    with pytest.raises(ModelFormatError, match=f"missing: {SECOND}"):
        open_model(tmp_path / "m")


def test_an_extra_shard_is_named(tmp_path: Path) -> None:
    weight_map = shard(write_tiny_llama(tmp_path / "m"))
    write_index(tmp_path / "m", {name: file for name, file in weight_map.items() if file == FIRST})

    with pytest.raises(ModelFormatError, match=f"does not name these shards: {SECOND}"):
        open_model(tmp_path / "m")


def test_a_tensor_in_the_wrong_shard_is_named(tmp_path: Path) -> None:
    weight_map = shard(write_tiny_llama(tmp_path / "m"))
    write_index(tmp_path / "m", {**weight_map, "model.norm.weight": FIRST, "model.embed_tokens.weight": SECOND})

    with pytest.raises(ModelFormatError, match="not in the shards named for them"):
        open_model(tmp_path / "m")


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    shard(write_tiny_llama(tmp_path / "m"))
    (tmp_path / "m" / SECOND).write_bytes((tmp_path / "m" / FIRST).read_bytes())

    with pytest.raises(ModelFormatError, match="in another shard too"):
        open_model(tmp_path / "m")


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    weight_map = shard(write_tiny_llama(tmp_path / "m"))
    del weight_map["model.norm.weight"]
    write_index(tmp_path / "m", weight_map)

    with pytest.raises(ModelFormatError, match="does not name these tensors"):
        open_model(tmp_path / "m")


def test_shards_without_an_index_are_refused(tmp_path: Path) -> None:
    shard(write_tiny_llama(tmp_path / "m"))
    (tmp_path / "m" / INDEX).unlink()

    with pytest.raises(ModelFormatError, match=r"no model\.safetensors\.index\.json"):
        open_model(tmp_path / "m")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_symbolic_links_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)

    with pytest.raises(ModelFormatError, match="symbolic link"):
        open_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_fifo_is_refused_at_once(tmp_path: Path, name: str) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / name).unlink()
    os.mkfifo(folder / name)

    with pytest.raises(ModelFormatError, match="not a regular file"):
        open_model(folder)


def test_a_device_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="not a regular file"):
        open_model(Path("/dev/null"))


def test_a_pickle_called_safetensors_is_found_by_its_content(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"\x80\x04\x95" + bytes(100))

    with pytest.raises(ModelUnsupportedError, match="is a pickle"):
        open_model(folder)


def test_a_zip_called_safetensors_is_found_by_its_content(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    with zipfile.ZipFile(folder / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x04.")

    with pytest.raises(ModelUnsupportedError, match="zip archive"):
        open_model(folder)


def test_a_folder_of_pickles_says_what_to_do(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelUnsupportedError, match="convert them to safetensors"):
        open_model(folder)


def test_a_model_that_brings_code_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))

    with pytest.raises(ModelUnsupportedError, match="auto_map"):
        open_model(folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[1]", "JSON object"), (b"{", "is not JSON"), (b'{"a":1,"a":2}', "twice"), (b'{"rope_theta":NaN}', "NaN")],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "config.json").write_bytes(content)

    with pytest.raises(ModelFormatError, match=words):
        open_model(folder)


def test_several_ggufs_ask_for_a_choice(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf")
    write_tiny_gguf(tmp_path / "b.gguf")

    with pytest.raises(ModelFormatError, match=r"a\.gguf, b\.gguf"):
        open_model(tmp_path)


def test_nothing_there_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no such file or folder"):
        open_model(tmp_path / "absent")
    with pytest.raises(ModelFormatError, match="neither"):
        open_model(tmp_path)
    with pytest.raises(ModelFormatError, match="cannot be read"):
        open_model(tmp_path / ("n" * 300))


def test_a_manifest_that_is_a_link_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    (folder / "headrace-manifest.json").symlink_to(tmp_path / "absent")

    with pytest.raises(ModelFormatError, match="symbolic link"):
        open_model(folder)


def test_a_folder_with_a_manifest_is_checked_before_it_is_parsed(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")
    manifest = write_manifest(folder, source="test", revision="1")
    assert open_model(folder).digest == manifest.digest
    (folder / "config.json").write_text("{}")

    with pytest.raises(ModelIntegrityError, match=r"config\.json: has SHA-256"):
        open_model(folder)
