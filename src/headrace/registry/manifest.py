"""The manifest beside a cached model: what its files must be, and when they were last found to be that.

Hashes are checked at pull, and again when a file's size, mtime, ctime or inode is not the one noted (ctime too: mtime
can be set back). A manifest names every file of its folder; a file that it does not name is refused like a changed one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import msgspec

from headrace.base.errors import ModelIntegrityError
from headrace.registry.files import check_name, open_regular, read_small, sha256_of, shown

MANIFEST_NAME = "headrace-manifest.json"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 4 * 2**20
# A file changed within this time before the manifest was written could change once more without a newer time stamp
# (kernel time stamps move in ticks of up to 10 ms; network file systems in seconds).
_RACE_NS = 2 * 10**9


class FileRecord(msgspec.Struct, frozen=True):
    """One file: its content's hash and the traits that tell whether it was touched since."""

    sha256: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    def has_traits_of(self, found: os.stat_result) -> bool:
        """Whether the file looks untouched."""
        traits = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        return traits == (self.size_bytes, self.mtime_ns, self.ctime_ns, self.inode)


class Manifest(msgspec.Struct, frozen=True):
    """Where a model came from and its files by name. ``digest`` is the hash over names and hashes."""

    source: str
    revision: str
    files: dict[str, FileRecord]
    digest: str
    format: int = _FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(record.size_bytes for record in self.files.values())


def digest_of(hashes: dict[str, str]) -> str:
    """Returns the model's digest: SHA-256 over the sorted lines ``sha256  name``."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def write_manifest(folder: Path, *, source: str, revision: str, hashes: dict[str, str] | None = None) -> Manifest:
    """Writes the manifest of what lies in ``folder`` now and returns it.

    Args:
        hashes: SHA-256 by name where already known; computed otherwise.
    """
    known = hashes or {}
    files = {name: _record(folder / name, known.get(name)) for name in _present(folder)}
    digest = digest_of({name: record.sha256 for name, record in files.items()})
    manifest = Manifest(source=source, revision=revision, files=files, digest=digest)
    _write(folder, manifest)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Returns the folder's manifest.

    Raises:
        ModelIntegrityError: it is damaged or of another format.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(read_small(path, _MAX_MANIFEST_BYTES), type=Manifest)
    except msgspec.MsgspecError as error:
        raise ModelIntegrityError(f"{path}: is damaged ({error}); pull the model again") from error
    if manifest.format != _FORMAT:
        raise ModelIntegrityError(f"{path}: has format {manifest.format}, this version reads {_FORMAT}")
    for name in manifest.files:
        check_name(name, str(path))
    if digest_of({name: record.sha256 for name, record in manifest.files.items()}) != manifest.digest:
        raise ModelIntegrityError(f"{path}: is damaged (its digest does not fit its hashes); pull the model again")
    return manifest


def verify_changed(folder: Path) -> str:
    """Checks the files that were touched since the last check; returns the model's digest.

    Raises:
        ModelIntegrityError: a file has other bytes, is missing, or is not named.
    """
    return _verify(folder, is_full=False).digest


def verify_all(folder: Path) -> Manifest:
    """Hashes every file of the folder against its manifest, which it returns. Raises as ``verify_changed``."""
    return _verify(folder, is_full=True)


def _verify(folder: Path, *, is_full: bool) -> Manifest:
    manifest = read_manifest(folder)
    written_ns = (folder / MANIFEST_NAME).stat().st_mtime_ns
    present = _present(folder)
    missing = sorted(manifest.files.keys() - set(present))
    extra = sorted(set(present) - manifest.files.keys())
    if missing or extra:
        what = f"missing: {', '.join(map(shown, missing[:8]))}" if missing else ""
        more = f"not in the manifest: {', '.join(map(shown, extra[:8]))}" if extra else ""
        raise ModelIntegrityError(f"{folder}: {'; '.join(filter(None, (what, more)))}; pull the model again")
    checked: dict[str, FileRecord] = {}
    for name, record in manifest.files.items():
        try:
            found = os.lstat(folder / name)
        except OSError as error:
            raise ModelIntegrityError(f"{folder / name}: went away while it was checked") from error
        is_settled = found.st_ctime_ns + _RACE_NS < written_ns
        if record.has_traits_of(found) and is_settled and not is_full:
            continue
        now = _record(folder / name, None)
        if now.sha256 != record.sha256:
            raise ModelIntegrityError(
                f"{folder / name}: has SHA-256 {now.sha256} and {now.size_bytes} bytes, the manifest names "
                f"{record.sha256} and {record.size_bytes}: the file is damaged or was changed; pull the model again"
            )
        checked[name] = now
    if checked:
        manifest = msgspec.structs.replace(manifest, files={**manifest.files, **checked})
        # A read-only store is fine: the check is then repeated at the next start.
        with contextlib.suppress(OSError):
            _write(folder, manifest)
    return manifest


def _present(folder: Path) -> list[str]:
    """Returns the names of all files below the folder, links and devices included, but for the manifest."""
    names = [
        str(Path(base, name).relative_to(folder))
        for base, folders, files in os.walk(folder)
        for name in [*files, *(sub for sub in folders if Path(base, sub).is_symlink())]
    ]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _record(path: Path, sha256: str | None) -> FileRecord:
    computed = sha256 or sha256_of(path)
    fd = open_regular(path)
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return FileRecord(computed, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _write(folder: Path, manifest: Manifest) -> None:
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    # Beside the folder, not in it: another process that checks the folder must not find an unnamed file.
    handle, name = tempfile.mkstemp(dir=folder.parent, prefix=".manifest-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(folder / MANIFEST_NAME)
    finally:
        Path(name).unlink(missing_ok=True)
