"""One file of packed weights: how it is written, and how it is read back with every byte checked.

    prefix      64 bytes: magic, lengths, SHA-256 over header and checksums
    header      JSON, padded with spaces to a page: whose weights these are, and where each lies
    data        the weights, each at a multiple of 64, gaps zero
    checksums   CRC-32 of each MiB of data, little-endian u32

The checks are against damage (a flipped byte is certain to be found), not against a forger: who can write here can
write the model too. CRC-32 runs at 3.7 GB/s a core here, SHA-256 at 1.6.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from headrace.base.errors import ModelIntegrityError
from headrace.engine.mapped import MappedBytes
from headrace.engine.weights import ALIGNMENT_BYTES, PackedWeight
from headrace.program.cost import layout_bytes
from headrace.program.opcodes import Layout

_MAGIC = b"HRPACK\x00\x01"  # the last byte is the version of this format
_PREFIX = struct.Struct("<8sQQ32s8x")
_CHUNK_BYTES = 2**20
_PAGE_BYTES = 4096
# A header names each weight in some 40 bytes; 100,000 weights are more than any model of today has.
_MAX_HEADER_BYTES = 16 * 2**20


class StoredWeight(msgspec.Struct, frozen=True, array_like=True):
    """One weight's entry in the header; ``start`` counts from the beginning of the data."""

    index: int
    layout: int
    n: int
    k: int
    start: int


class Header(msgspec.Struct, frozen=True):
    """What a file says of itself.

    Args:
        key: hex hash of everything that the bytes depend on.
        model: the model's name as people know it.
        model_digest: ``ModelFiles.digest``.
        scheme: dtype and quantization, for people.
    """

    key: str
    model: str
    model_digest: str
    scheme: str
    weights: list[StoredWeight]


def write_packed(fd: int, header: Header, weights: Sequence[PackedWeight]) -> None:
    """Writes a whole file to the empty ``fd``; the prefix comes last, so what is cut off cannot be read.

    Args:
        header: its ``weights`` are filled in here.

    Raises:
        OSError: the disk is full or broken.
    """
    places: list[StoredWeight] = []
    start = 0
    for weight in weights:
        places.append(StoredWeight(weight.index, int(weight.layout), weight.n, weight.k, start))
        start += _padded(weight.data.nbytes)
    text = msgspec.json.encode(msgspec.structs.replace(header, weights=places))
    text += b" " * (-(_PREFIX.size + len(text)) % _PAGE_BYTES)  # a map begins at a page
    checksums: list[int] = []
    crc, left = 0, _CHUNK_BYTES
    offset = _PREFIX.size
    offset += _write_all(fd, memoryview(text), offset)
    for piece in _pieces(weights):
        while piece:
            part = piece[:left]
            crc = zlib.crc32(part, crc)
            offset += _write_all(fd, part, offset)
            piece = piece[len(part) :]
            left -= len(part)
            if left == 0:
                checksums.append(crc)
                crc, left = 0, _CHUNK_BYTES
    if left < _CHUNK_BYTES:
        checksums.append(crc)
    table = np.array(checksums, "<u4").tobytes()
    _write_all(fd, memoryview(table), offset)
    digest = hashlib.sha256(text + table).digest()
    _write_all(fd, memoryview(_PREFIX.pack(_MAGIC, len(text), start, digest)), 0)


def read_header(fd: int) -> Header:
    """Returns a file's header and checks that the file has the length that it states.

    Raises:
        ModelIntegrityError: it is damaged, cut off, or of another format.
    """
    return _read_frame(fd)[0]


def read_packed(fd: int, key: str, threads: int) -> tuple[dict[int, PackedWeight], MappedBytes]:
    """Returns the weights by index, mapped, every byte checked, and the map that they lie in.

    Args:
        key: what the file must hold.

    Raises:
        ModelIntegrityError: it is damaged, cut off, of another format, or holds something else.
        OSError: it cannot be mapped.

    Cost: 0.3 s of one core a GB, while the file's pages are in memory.
    """
    header, data_start, data_bytes, checksums = _read_frame(fd)
    if header.key != key:
        raise ModelIntegrityError(f"holds {header.model} ({header.scheme}) under the key {header.key[:12]}")
    end = 0
    for place in header.weights:
        end = _check_place(place, end)
    if end != data_bytes or not data_bytes or data_start % _PAGE_BYTES:
        raise ModelIntegrityError(f"its weights take {end} bytes, its data has {data_bytes} from byte {data_start}")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    mapped = MappedBytes(fd, data_start, data_bytes)
    data = mapped.view()

    def is_good(chunk: int) -> bool:
        return zlib.crc32(data[chunk * _CHUNK_BYTES : (chunk + 1) * _CHUNK_BYTES].data) == checksums[chunk]

    with ThreadPoolExecutor(max(1, threads)) as pool:
        are_good = list(pool.map(is_good, range(len(checksums))))
    if not all(are_good):
        raise ModelIntegrityError(f"MiB {are_good.index(False)} of its data has another checksum")
    weights = {}
    for place in header.weights:
        layout = Layout(place.layout)
        stop = place.start + layout_bytes(layout, place.n, place.k)
        weights[place.index] = PackedWeight(place.index, layout, place.n, place.k, data[place.start : stop])
    return weights, mapped


def _read_frame(fd: int) -> tuple[Header, int, int, list[int]]:
    """Returns the header, where the data begins, its length, and the checksums."""
    size = os.fstat(fd).st_size
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise ModelIntegrityError(f"has {size} bytes, a file of packed weights is longer")
    magic, header_bytes, data_bytes, digest = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ModelIntegrityError(f"begins with {magic!r}, a file of packed weights of this version with {_MAGIC!r}")
    num_chunks = -(-data_bytes // _CHUNK_BYTES)
    stated = _PREFIX.size + header_bytes + data_bytes + 4 * num_chunks
    if size != stated or header_bytes > _MAX_HEADER_BYTES or any(prefix[-8:]):
        raise ModelIntegrityError(f"has {size} bytes, its prefix states {stated}")
    text = os.pread(fd, header_bytes, _PREFIX.size)
    table = os.pread(fd, 4 * num_chunks, _PREFIX.size + header_bytes + data_bytes)
    if hashlib.sha256(text + table).digest() != digest:
        raise ModelIntegrityError("its header or its checksums are damaged")
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise ModelIntegrityError(f"its header cannot be read: {error}") from error
    return header, _PREFIX.size + header_bytes, data_bytes, np.frombuffer(table, "<u4").tolist()


def _check_place(place: StoredWeight, end: int) -> int:
    """Returns where the next weight must begin."""
    try:
        size = layout_bytes(Layout(place.layout), place.n, place.k)
    except ValueError as error:
        raise ModelIntegrityError(f"weight {place.index} has the unknown layout {place.layout}") from error
    if place.start != end or min(place.n, place.k) < 1:
        raise ModelIntegrityError(f"weight {place.index} lies at {place.start}, expected at {end}")
    return end + _padded(size)


def _pieces(weights: Sequence[PackedWeight]) -> Iterator[memoryview]:
    """Yields the data area, at most a chunk at a time."""
    for weight in weights:
        whole = weight.data.reshape(-1).data
        for start in range(0, len(whole), _CHUNK_BYTES):
            yield whole[start : start + _CHUNK_BYTES]
        if gap := _padded(len(whole)) - len(whole):
            yield memoryview(bytes(gap))


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES


def _write_all(fd: int, data: memoryview, offset: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
    return done
