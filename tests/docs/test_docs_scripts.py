"""Scripts run as the documents say: from any folder, with no environment activated."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BARE = {"PATH": "/usr/bin:/bin"}


def python_scripts() -> list[Path]:
    """Gives every executable of ours that is written in Python."""
    files = [file for folder in ("scripts", "benchmarks") for file in (ROOT / folder).rglob("*") if file.is_file()]
    runnable = [file for file in files if file.stat().st_mode & 0o111 and file.suffix == ""]
    return sorted(file for file in runnable if "import annotations" in file.read_text(errors="ignore"))


@pytest.mark.parametrize("script", python_scripts(), ids=lambda script: str(script.relative_to(ROOT)))
def test_a_script_names_the_projects_own_python_and_no_other(script: Path) -> None:
    words = script.read_text().partition("\n")[0]

    named = words.partition('"${0%/*}/')[2].partition('"')[0]

    assert words.startswith("#!/usr/bin/env -S sh -c"), words
    assert (script.parent / named).resolve() == ROOT / "scripts/python"
    assert len(words) < 128, "older kernels read no further"


@pytest.mark.parametrize("name", ["scripts/start-time", "scripts/http-load", "benchmarks/peers/run"])
def test_a_script_runs_from_another_folder_with_a_bare_path(name: str, tmp_path: Path) -> None:
    said = subprocess.run([ROOT / name, "--help"], cwd=tmp_path, env=BARE, capture_output=True, text=True, check=False)

    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith(f"usage: {Path(name).name}")


def test_a_script_without_an_environment_says_what_makes_one(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("python", "start-time"):
        shutil.copy(ROOT / "scripts" / name, folder / name)

    said = subprocess.run([folder / "start-time"], cwd="/", env=BARE, capture_output=True, text=True, check=False)

    assert said.returncode == 2
    assert "run scripts/setup" in said.stderr
