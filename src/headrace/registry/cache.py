"""The local store of fetched models: one read-only folder per content, and one reference per source that points at it.

    <cache>/models/<name>-<digest>/   files (read-only) and their manifest
    <cache>/refs/<key>.json           which folder a source last resolved to
    <cache>/staging/<key>/            what is being fetched; kept when interrupted, so that it can go on
    <cache>/locks/<key>               held while one process fetches a source
    <cache>/packed/                   packed weights of models that were served (``engine.packed_cache``)

A folder appears in ``models`` by one rename, complete, hashed and flushed to disk: a crash leaves only staging behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.errors import MachineError, ModelIntegrityError, SourceError
from headrace.registry.manifest import MANIFEST_NAME, Manifest, read_manifest, verify_all, write_manifest

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done (a file's name), bytes so far, and bytes in all where known."""

_RESERVE_BYTES = 256 * 2**20
"""Disk space that a download leaves free: a full disk stops logs and databases too."""


class _Reference(msgspec.Struct, frozen=True):
    source: str
    folder: str


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One fetched model. ``problem`` says why its manifest cannot be used, None when it can."""

    source: str
    path: Path
    revision: str
    digest: str
    size_bytes: int
    files: tuple[str, ...]
    problem: str | None = None


def default_cache_path() -> Path:
    """Returns the user's model cache: ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "headrace"


def packed_folder(cache: Path) -> Path:
    """Returns where packed weights are kept."""
    return cache / "packed"


def lookup(cache: Path, source: str) -> Path | None:
    """Returns the folder that ``source`` was fetched to, None when it was not. Checks no hashes."""
    path = cache / "refs" / f"{_key(source)}.json"
    try:
        reference = msgspec.json.decode(path.read_bytes(), type=_Reference)
    except (OSError, msgspec.MsgspecError):
        return None
    folder = cache / "models" / Path(reference.folder).name
    is_whole = reference.source == source and (folder / MANIFEST_NAME).is_file()
    return folder if is_whole else None


@contextmanager
def staging(cache: Path, source: str, progress: Progress) -> Iterator[Path]:
    """Gives the source's staging folder, alone: other processes that want the same source wait."""
    key = _key(source)
    folder = cache / "staging" / key
    try:
        for path in (folder, cache / "locks", cache / "models", cache / "refs"):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"the model cache {cache} cannot be made: {error.strerror}; set paths.model_cache"
        ) from error
    with (cache / "locks" / key).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches this model", 0, None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        folder.mkdir(exist_ok=True)
        yield folder


def require_space(folder: Path, size_bytes: int) -> None:
    """Raises MachineError when ``size_bytes`` more would fill the disk under ``folder``."""
    free = shutil.disk_usage(folder).free
    if size_bytes + _RESERVE_BYTES > free:
        raise MachineError(
            f"{folder}: {size_bytes / 1e9:.2f} GB are needed and {_RESERVE_BYTES / 1e9:.2f} GB stay free, "
            f"but the disk has {free / 1e9:.2f} GB left: make room or set paths.model_cache"
        )


def publish(
    cache: Path,
    source: str,
    staged: Path,
    *,
    name: str,
    revision: str,
    pins: dict[str, str],
    progress: Progress,
) -> Path:
    """Moves what lies in ``staged`` into the store and returns its folder.

    Args:
        name: readable part of the folder's name.
        pins: SHA-256 by file name that the content must have.

    Raises:
        ModelIntegrityError: a pinned file has other bytes; the staged files are removed, so that a retry starts anew.
    """
    total = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    progress("checking SHA-256", 0, total)
    for path in staged.rglob("*"):
        if path.is_file():
            path.chmod(0o444)
            _flush(path)
    manifest = write_manifest(staged, source=source, revision=revision)
    progress("checking SHA-256", total, total)
    for file, expected in pins.items():
        found = manifest.files[file].sha256 if file in manifest.files else "no such file"
        if found != expected:
            shutil.rmtree(staged)
            raise ModelIntegrityError(f"{source}: {file} should have SHA-256 {expected}, found {found}")
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:80]
    target = cache / "models" / f"{slug}-{manifest.digest[:12]}"
    if target.exists():
        _discard(target)
    staged.rename(target)
    _flush(target.parent)
    _write_reference(cache, _Reference(source, target.name))
    return target


def list_models(cache: Path) -> list[CachedModel]:
    """Returns the fetched models by source; a damaged one is listed with its problem."""
    found: list[CachedModel] = []
    for path in sorted((cache / "refs").glob("*.json")):
        try:
            reference = msgspec.json.decode(path.read_bytes(), type=_Reference)
        except (OSError, msgspec.MsgspecError):
            continue
        folder = lookup(cache, reference.source)
        if folder is not None:
            found.append(_describe(reference.source, folder))
    return sorted(found, key=lambda model: model.source)


def verify_model(cache: Path, source: str) -> Manifest:
    """Hashes every file of a fetched model; returns its manifest.

    Raises:
        SourceError: it was not fetched.
        ModelIntegrityError: a file has other bytes than at the pull.
    """
    return verify_all(_existing(cache, source))


def remove_model(cache: Path, source: str) -> int:
    """Removes a fetched model and returns the bytes freed (0 when another source shares its files).

    Raises:
        SourceError: it was not fetched.
    """
    folder = _existing(cache, source)
    (cache / "refs" / f"{_key(source)}.json").unlink()
    if any(other.path == folder for other in list_models(cache)):
        return 0
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    _discard(folder)
    return size_bytes


def _existing(cache: Path, source: str) -> Path:
    folder = lookup(cache, source)
    if folder is None:
        known = ", ".join(model.source for model in list_models(cache)) or "nothing"
        raise SourceError(f"{source} is not in the cache {cache}, which has {known}")
    return folder


def _describe(source: str, folder: Path) -> CachedModel:
    try:
        manifest = read_manifest(folder)
    except ModelIntegrityError as error:
        return CachedModel(source, folder, "", "", 0, (), error.message)
    files = tuple(sorted(manifest.files))
    return CachedModel(source, folder, manifest.revision, manifest.digest, manifest.size_bytes, files)


def _key(source: str) -> str:
    """Returns a file name for a source: readable, and distinct for distinct sources."""
    readable = re.sub(r"[^A-Za-z0-9._=-]+", "-", source).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def _write_reference(cache: Path, reference: _Reference) -> None:
    path = cache / "refs" / f"{_key(reference.source)}.json"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.encode(reference))
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _discard(folder: Path) -> None:
    """Removes a model folder; renamed first, so that nobody opens one that is half gone. Maps of it stay valid."""
    gone = folder.with_name(f".gone-{os.getpid()}-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone)
