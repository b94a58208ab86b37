"""Packed weights kept on disk, so that the next start of a model reads them instead of reading and packing the model.

    <folder>/<name>-<key>.packed      one model under one scheme (``packed_file`` is its format)
    <folder>/<name>-<key>.partial     one that is being written; locked by its writer

An entry's name carries the key: a hash of the model's identity, the scheme, how each weight is put together, and this
build. It appears by one rename, whole and flushed. It is mapped, every byte is checked, and behind the first requests
it moves into memory with huge pages, which decode reads faster (``mapped``, docs/decisions/0009-packed-cache.md).
Nothing here can fail a start: what goes wrong is a warning, and packing follows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path

import headrace
from headrace.base.errors import ModelError, ModelIntegrityError
from headrace.base.log import get_log
from headrace.base.units import GIB
from headrace.engine.mapped import MappedBytes
from headrace.engine.packed_file import Header, read_header, read_packed, write_packed
from headrace.engine.weight_plan import WeightPlan
from headrace.engine.weights import PackedWeight
from headrace.registry.files import open_regular
from headrace.registry.formats.tensor import TensorView
from headrace.registry.manifest import MANIFEST_NAME
from headrace.registry.model import ModelFiles

# A disk filled to the brim stops logs and databases.
_RESERVE_BYTES = 2 * GIB
# A file changed this shortly before it was packed may change again without a newer time stamp; see ``manifest``.
_RACE_NS = 2 * 10**9
_SUFFIX, _PARTIAL = ".packed", ".partial"

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the cache. ``problem`` says why it cannot be used, None when its header is good."""

    path: Path
    model: str
    model_digest: str
    scheme: str
    size_bytes: int
    used_at_s: float
    problem: str | None = None


class PackedCache:
    """The place of one model under one scheme.

    Args:
        folder: made when something is saved.
        limit_bytes: of all entries together; the least recently used go first.
        name: the model's, for people.
        scheme: dtype and quantization, for people.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, files: ModelFiles, plans: Sequence[WeightPlan], *, name: str, scheme: str
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._files = files
        self._traits = _traits(files.weights)
        self._kept = {plan.spec.index for plan in plans if plan.spec.kind != "rope"}
        self._started_at_ns = time.time_ns()
        self._mapped: MappedBytes | None = None
        key = pack_key(files, plans, scheme)
        slug = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:80] or "model"
        self.path = folder / f"{slug}-{key[:32]}{_SUFFIX}"
        self._header = Header(key, name, files.digest, scheme, [])

    def read(self, threads: int) -> dict[int, PackedWeight]:
        """Returns the weights by index (all but rope tables), or nothing when they are not there or are damaged.

        A damaged entry is removed, with a warning.
        """
        if not self.path.exists():
            return {}
        try:
            with _opened(self.path) as fd:
                weights, self._mapped = read_packed(fd, self._header.key, threads)
                if weights.keys() != self._kept:
                    raise ModelIntegrityError("holds other weights than this model has")
                with contextlib.suppress(OSError):  # a read-only folder; its entries then go by their age
                    os.utime(self.path)
        except (ModelError, OSError) as error:
            log.warning("packed_weights_damaged", path=str(self.path), reason=str(error))
            with contextlib.suppress(OSError):
                self.path.unlink()
            return {}
        log.info("packed_weights_read", size_bytes=sum(weight.data.nbytes for weight in weights.values()))
        return weights

    def finish_in_background(self, weights: Iterable[PackedWeight]) -> threading.Thread:
        """Starts what can wait until the model is ready, in a thread that gives way to all others.

        That is: weights that were read move into memory with huge pages, others are saved.
        """
        kept = [weight for weight in weights if weight.index in self._kept]

        def run() -> None:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            if self._mapped is None:
                self.save(kept)
                return
            try:
                self._mapped.settle()
            except OSError as error:
                log.warning("packed_weights_stay_mapped", reason=error.strerror)

        thread = threading.Thread(target=run, name="packed-weights", daemon=True)
        thread.start()
        return thread

    def save(self, weights: Sequence[PackedWeight]) -> bool:
        """Makes room and writes the entry; returns whether this call wrote it. What prevents it is logged."""
        size_bytes = sum(weight.data.nbytes for weight in weights)
        try:
            reason = self._why_not(size_bytes)
            if reason is None:
                is_written = self._write(weights)
                if is_written:
                    log.info("packed_weights_saved", size_bytes=size_bytes)
                return is_written
        except OSError as error:
            reason = f"{error.strerror} ({self._folder})"
        if reason is not None:
            log.warning("packed_weights_not_saved", size_bytes=size_bytes, reason=reason)
        return False

    def _why_not(self, size_bytes: int) -> str | None:
        if size_bytes > self._limit_bytes:
            return f"the limit of inference_engine.packed_cache_gib is {self._limit_bytes / GIB:g} GiB"
        traits = _traits(self._files.weights)
        newest_ns = max(trait.ctime_ns for trait in traits)
        if traits != self._traits or newest_ns + _RACE_NS > self._started_at_ns:
            return "the model's files were changed while or shortly before they were read"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _clean(self._folder, self._limit_bytes - size_bytes, spared=self.path)
        free = shutil.disk_usage(self._folder).free
        if size_bytes + _RESERVE_BYTES > free:
            return f"the disk has {free / GIB:.1f} GiB left, of which {_RESERVE_BYTES // GIB} GiB stay free"
        return None

    def _write(self, weights: Sequence[PackedWeight]) -> bool:
        partial = self.path.with_suffix(_PARTIAL)
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False  # another worker writes the very same
            if not _is_same(fd, partial):
                return False  # it has just finished: this file is the entry now
            try:
                os.ftruncate(fd, 0)
                write_packed(fd, self._header, weights)
                os.fsync(fd)
            except OSError:
                partial.unlink(missing_ok=True)
                raise
            partial.replace(self.path)
            _flush(self._folder)
            return True
        finally:
            os.close(fd)


def pack_key(files: ModelFiles, plans: Iterable[WeightPlan], scheme: str) -> str:
    """Returns the hex hash of everything that packed bytes depend on.

    That is: the model's content (its manifest's digest, checked whenever a file was touched; without a manifest the
    cheap digest and each weight file's size, times and inode), the scheme, how each weight is made of stored tensors,
    and the build. Layouts do not depend on the instruction set, so it is not part.
    """
    sha = hashlib.sha256()
    identity = [] if os.path.lexists(files.folder / MANIFEST_NAME) else _traits(files.weights)
    parts = [_recipe(plan) for plan in plans if plan.spec.kind != "rope"]
    sha.update(repr((files.digest, identity, scheme, build_digest(), parts)).encode())
    return sha.hexdigest()


@cache
def build_digest() -> str:
    """Returns the hex hash of what packs: this machine's kind, the native library and the sources that steer it."""
    root = Path(headrace.__file__).parent
    sha = hashlib.sha256(f"{platform.machine()}\n".encode())
    for package in ("engine", "kernels", "program", "registry"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".so"):
                sha.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
                sha.update(path.read_bytes())
    return sha.hexdigest()


def list_entries(folder: Path) -> list[Entry]:
    """Returns the entries, the least recently used first; damaged ones with their problem."""
    found: list[Entry] = []
    for path in folder.glob(f"*{_SUFFIX}"):
        try:
            with _opened(path) as fd:
                status = os.fstat(fd)
                try:
                    header, problem = read_header(fd), None
                except ModelIntegrityError as error:
                    header, problem = Header("", path.stem, "", "", []), error.message
        except (ModelError, OSError):
            continue  # gone meanwhile, or no file of ours
        size = status.st_size
        found.append(Entry(path, header.model, header.model_digest, header.scheme, size, status.st_mtime, problem))
    return sorted(found, key=lambda entry: entry.used_at_s)


def remove_entries(folder: Path, model_digest: str) -> int:
    """Removes the entries of a model and returns the bytes freed. Processes that read one are not disturbed."""
    freed = 0
    for entry in list_entries(folder):
        if entry.model_digest == model_digest:
            entry.path.unlink(missing_ok=True)
            freed += entry.size_bytes
    return freed


def _clean(folder: Path, limit_bytes: int, spared: Path) -> None:
    """Removes what was left half-written, and the oldest entries until the others take ``limit_bytes``."""
    for path in folder.glob(f"*{_PARTIAL}"):
        # One that is gone meanwhile was another worker's, and is its entry now.
        with contextlib.suppress(ModelError, OSError), _opened(path) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(fd, path):
                path.unlink()
    entries = [entry for entry in list_entries(folder) if entry.path != spared]
    total = sum(entry.size_bytes for entry in entries)
    for entry in entries:
        if total <= limit_bytes:
            break
        entry.path.unlink(missing_ok=True)
        total -= entry.size_bytes
        log.info("packed_weights_evicted", path=str(entry.path), size_bytes=entry.size_bytes)


@dataclass(frozen=True, slots=True)
class _Traits:
    name: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def _traits(paths: Sequence[Path]) -> list[_Traits]:
    found = [(path.name, path.stat()) for path in paths]
    return [_Traits(name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for name, at in found]


def _recipe(value: object) -> object:
    """Returns a plan as plain values that print alike in every process; a stored tensor is its name, type and shape."""
    match value:
        case TensorView():
            return (value.name, value.dtype, value.shape)
        case Enum():
            return value.name
        case tuple() | list():
            return tuple(_recipe(item) for item in value)
        case Mapping():
            return tuple((str(name), _recipe(item)) for name, item in sorted(value.items()))
        case None | bool() | int() | float() | str():
            return value
        case _ if is_dataclass(value):
            return tuple((field.name, _recipe(getattr(value, field.name))) for field in fields(value))
        case _:
            raise AssertionError(f"a weight's plan holds {type(value).__name__}, which has no stable print")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_same(fd: int, path: Path) -> bool:
    """Whether ``path`` still names the open file."""
    try:
        named = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(named.st_mode) and os.path.samestat(os.fstat(fd), named)


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
