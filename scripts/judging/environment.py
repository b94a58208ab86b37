"""Environments of judges under build/judges: one folder each, made once, safe to repeat."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "judges"


def python_with(name: str, packages: tuple[str, ...]) -> Path:
    """Gives the interpreter of the environment ``name`` that holds ``packages``; makes it where it is missing or old.

    A stamp says what was asked for, so a changed list is installed and an unchanged one costs nothing.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / "packages.txt"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    uv = shutil.which("uv")
    install = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    subprocess.run([*install, "--quiet", *packages], check=True)
    stamp.write_text(wanted)
    return python


def version_of(python: Path, package: str) -> str:
    """Gives the installed version of a package."""
    query = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([str(python), "-c", query], capture_output=True, text=True, check=True).stdout.strip()


def source_of(package: str, version: str, part: str, *, needs: tuple[str, ...] = ()) -> Path:
    """Gives a folder of a package's source distribution, fetched once and kept under build/judges/sources.

    pip unpacks a source distribution to read its metadata; with ``--no-clean`` the tree stays where ``TMPDIR`` says,
    whether or not the metadata could be made.

    Args:
        part: the folder wanted, relative to the tree.
        needs: packages that the metadata step imports.

    Raises:
        FileNotFoundError: the distribution could not be fetched, or has no such folder.
    """
    target = FOLDER / "sources" / f"{package}-{version}" / part
    if not target.is_dir():
        python = python_with("sources/fetch", ("setuptools", "wheel", "scikit-build-core", "setuptools-scm", *needs))
        scratch = FOLDER / "sources" / f"unpacked-{package}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        options = ["--no-deps", "--no-build-isolation", "--no-clean", "--no-binary", package, "-d", str(scratch)]
        subprocess.run(
            [str(python), "-m", "pip", "download", "--quiet", *options, f"{package}=={version}"],
            env={"TMPDIR": str(scratch), **_environment()},
            capture_output=True,
            check=False,
        )
        found = next((path for path in scratch.glob(f"*/*/{part}") if path.is_dir()), None)
        if found is None:
            raise FileNotFoundError(f"{package} {version} could not be fetched, or holds no {part}")
        shutil.copytree(found, target)
        shutil.rmtree(scratch)
    return target


def npm_with(folder: Path, shared: Path) -> Path:
    """Gives a copy of a committed npm project with its locked packages installed.

    Args:
        shared: a folder of scripts that projects import.

    Raises:
        FileNotFoundError: npm is not installed.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed: apt-get install nodejs npm")
    target = FOLDER / folder.name
    target.mkdir(parents=True, exist_ok=True)
    for file in (*folder.iterdir(), *shared.iterdir()):
        shutil.copy(file, target / file.name)
    lock = hashlib.sha256((target / "package-lock.json").read_bytes()).hexdigest()
    stamp = target / "installed.txt"
    if not stamp.is_file() or stamp.read_text() != lock:
        subprocess.run([npm, "ci", "--silent", "--no-audit", "--no-fund"], cwd=target, check=True)
        stamp.write_text(lock)
    return target


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "TMPDIR"}
