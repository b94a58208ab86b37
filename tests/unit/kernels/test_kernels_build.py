"""An old native module beside newer C++ sources is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.kernels import _native, build

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the native module is built from."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    return tmp_path


def test_digest_of_the_build_is_that_of_the_sources(tree: Path) -> None:
    assert build.source_digest(tree) == _native.source_digest
    assert build.why_stale(tree) is None


@pytest.mark.parametrize("name", ["csrc/ops/linear.h", "csrc/bind.cpp", "CMakeLists.txt", "csrc/ops/new.h"])
def test_changed_or_new_source_makes_the_module_an_old_one(tree: Path, name: str) -> None:
    with (tree / name).open("a") as file:
        file.write("\n")

    assert build.why_stale(tree) == "the native module was not built from the C++ sources beside it"


def test_changed_test_and_renamed_source_are_told_apart(tree: Path) -> None:
    (tree / "csrc" / "tests" / "more.h").write_text("\n")
    assert build.why_stale(tree) is None

    (tree / "csrc" / "ops" / "norm.h").rename(tree / "csrc" / "ops" / "norms.h")
    assert build.why_stale(tree) is not None


def test_installed_package_has_no_sources_to_compare_with(tmp_path: Path) -> None:
    assert build.source_digest(tmp_path) is None
    assert build.why_stale(tmp_path) is None


def test_module_from_before_it_knew_its_sources_is_an_old_one(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_native, "source_digest")

    assert build.why_stale(tree) is not None
