"""The rule for skips, tried on a suite of its own: a skip that nobody listed fails the run."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SUITE = """
import pytest

def test_runs() -> None:
    pass

@pytest.mark.skip(reason="no quantum unit here")
def test_skips() -> None:
    pass
"""


@pytest.mark.parametrize(
    ("allowed", "code"),
    [
        ("", 1),
        ("test_a.py::test_skips | no quantum unit here", 0),
        ("*::test_skips | *quantum*", 0),
        ("*::test_skips | another reason", 1),
        ("*::test_runs | *quantum*", 1),
    ],
)
def test_skip_fails_the_run_unless_test_and_reason_are_listed(tmp_path: Path, allowed: str, code: int) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "allowed_skips.txt").write_text(f"# why\n{allowed}\n")
    (tmp_path / "test_a.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = model\n")

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == code, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
    assert ("test_skips: no quantum unit here" in done.stdout) is bool(code)
