"""Opening files that may be hostile: regular files only, no symbolic links, nothing that blocks, bounded reads.

Everything the registry reads from a model folder goes through here, so a FIFO, a device or a link that points out of
the folder is refused in one place.

Bytes are handed on as memoryviews: supervisor and front read headers only and never load numpy
(``formats.tensor.TensorView.data``).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from pathlib import Path

from headrace.base.errors import ModelFormatError, ModelIntegrityError


def open_regular(path: Path) -> int:
    """Opens ``path`` for reading and returns its descriptor, which the caller closes.

    Raises:
        ModelFormatError: missing, unreadable, or anything but a regular file (symbolic links included).
    """
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes would otherwise wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ModelFormatError(
                f"{path}: is a symbolic link; links in a model folder are not followed: copy the file there instead"
            ) from error
        raise ModelFormatError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise ModelFormatError(f"{str(path)!r}: is not a usable file name: {error}") from error
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise ModelFormatError(f"{path}: is not a regular file ({stat.filemode(mode)}); model files must be")
    return fd


def map_file(path: Path) -> memoryview:
    """Returns the whole file as a read-only memory map; no byte is read yet."""
    fd = open_regular(path)
    try:
        if os.fstat(fd).st_size == 0:
            raise ModelFormatError(f"{path}: is empty")
        mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)
    return memoryview(mapped)


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Returns the content of a file of at most ``limit_bytes``."""
    fd = open_regular(path)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > limit_bytes:
            raise ModelFormatError(f"{path}: has {size} bytes, the limit for this kind of file is {limit_bytes}")
        return file.read(limit_bytes)


def regular_size(path: Path) -> int:
    """Returns the size in bytes of a regular file; refuses anything else."""
    fd = open_regular(path)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    """Returns the hex SHA-256 of a regular file. Cost: about 1 s per GB."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_name(name: str, where: str) -> str:
    """Returns ``name`` if it is a plain relative name: no absolute path, no ``..``, no hidden part, no backslash.

    Raises:
        ModelIntegrityError: otherwise; ``where`` says which file the name came from.
    """
    parts = name.split("/")
    is_plain = all(part and not part.startswith(".") and part.isprintable() and "\\" not in part for part in parts)
    if not is_plain or len(name) > 512:
        raise ModelIntegrityError(f"{where}: names the file {name[:80]!r}, which is not a plain name inside the folder")
    return name


def shown(text: str, limit: int = 80) -> str:
    """Returns foreign text as it may stand in a message: quoted, escaped, cut."""
    quoted = repr(text[:limit])
    return quoted if len(text) <= limit else f"{quoted}… ({len(text)} characters)"
