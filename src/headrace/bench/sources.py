"""Reads sample files from disk as they are needed: memory stays flat however long the file is.

Three kinds of file are told apart by their first bytes: JSON lines, one JSON array (ShareGPT dumps), and CSV traces
(Azure, BurstGPT). What a line means is ``lines``' concern.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final, TextIO

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.units import format_bytes
from headrace.bench.lines import MAX_TRACE_TOKENS, LineError, LineReader
from headrace.bench.prompts import PromptMaker
from headrace.bench.sample import Sample

MAX_LINE_BYTES: Final = 16 * 2**20
"""A request of a million tokens has 5 MB; servers refuse larger bodies long before this."""
_CHUNK_CHARS: Final = 2**18
_BOM: Final = b"\xef\xbb\xbf"
# Names of the columns of a trace, in lower case without spaces and underscores.
_TIME_COLUMNS: Final = ("timestamp", "arrivaltimestamp", "time")
_INPUT_COLUMNS: Final = ("contexttokens", "requesttokens", "inputlength", "inputtokens")
_OUTPUT_COLUMNS: Final = ("generatedtokens", "responsetokens", "outputlength", "outputtokens")

Read = Callable[[int], Sample]
"""Called with the line's number; raises LineError."""
TellBad = Callable[[int, str], None]
"""Called with a line's number, from 1, and what is wrong with it."""


class OnBad(StrEnum):
    """What a line that is no request does: it is told and left out, or it ends the reading."""

    SKIP = "skip"
    STOP = "stop"


def open_samples(
    path: Path,
    *,
    on_bad: OnBad = OnBad.SKIP,
    limit: int | None = None,
    tell_bad: TellBad = lambda line, reason: None,
    prompts: PromptMaker | None = None,
    seed: int = 0,
) -> Iterator[Sample]:
    """Gives the samples of a file in its order, reading as they are taken.

    Args:
        limit: at most so many good ones.
        tell_bad: hears of every line that is no request; blank lines are none.
        prompts: fills traces; default: the text that ships, lengths by words.
        seed: of that filling.

    Raises:
        ConfigError: the file cannot be read or holds nothing, a line is bad and ``on_bad`` is stop, or the rest cannot
            be understood after a broken place (array, CSV header).
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder, a file is needed")
        reader = LineReader(PromptMaker() if prompts is None else prompts, seed)
        found = 0
        for line, read in _reads(file, path, reader):
            try:
                sample = read(line)
            except LineError as error:
                tell_bad(line, str(error))
                if on_bad is OnBad.STOP:
                    raise ConfigError(f"{path}:{line}: {error}") from error
                continue
            yield sample
            found += 1
            if found == limit:
                return
        if not found:
            raise ConfigError(f"{path}: holds no request that can be sent")


def _reads(file: BinaryIO, path: Path, reader: LineReader) -> Iterator[tuple[int, Read]]:
    start = file.read(4096).removeprefix(_BOM).lstrip()
    file.seek(0)
    if start[:1] == b"[":
        return _array(path, reader)
    first = start.partition(b"\n")[0].lower().replace(b"_", b"").replace(b" ", b"")
    if start[:1] != b"{" and any(name.encode() in first.split(b",")[0] for name in _TIME_COLUMNS):
        return _csv(path, reader)
    return _json_lines(file, reader)


def _json_lines(file: BinaryIO, reader: LineReader) -> Iterator[tuple[int, Read]]:
    line = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        line += 1
        is_long = len(raw) > MAX_LINE_BYTES
        if is_long:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(MAX_LINE_BYTES)
        text = (raw.removeprefix(_BOM) if line == 1 else raw).strip()
        if is_long:
            yield line, _refuse(f"is longer than {format_bytes(MAX_LINE_BYTES)}, the limit")
        elif text:
            yield line, _decoded(text, reader)


def _decoded(text: bytes, reader: LineReader) -> Read:
    def read(line: int) -> Sample:
        try:
            found = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LineError(f"is not JSON: {error}") from error
        return reader.sample(found, line)

    return read


def _array(path: Path, reader: LineReader) -> Iterator[tuple[int, Read]]:
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, item in _items(file, path):
                yield line, _found(item, reader)
    except UnicodeDecodeError as error:
        raise _broken(path, line, f"is not UTF-8 in this item or the next ones: {error.reason}") from error


def _items(file: TextIO, path: Path) -> Iterator[tuple[int, object]]:
    """Gives the items of a JSON array with the line each begins on; one item and a chunk are held."""
    decoder = json.JSONDecoder()
    buffer, at, line, is_whole = "", 0, 1, False
    expected = "["
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n":
            line += buffer[at] == "\n"
            at += 1
        if at == len(buffer) and not is_whole:
            buffer, at = file.read(_CHUNK_CHARS), 0
            is_whole = not buffer
            continue
        here = buffer[at : at + 1]
        if expected != "item":
            if here == "]" and expected == ",":
                return
            if here != expected:
                raise _broken(path, line, f"{expected!r} is missing" if here else "the file ends inside the array")
            expected, at = "item", at + 1
            continue
        if here == "]":
            return
        try:
            item, stop = decoder.raw_decode(buffer, at)
        except (json.JSONDecodeError, RecursionError) as error:
            if is_whole or len(buffer) - at > MAX_LINE_BYTES or isinstance(error, RecursionError):
                raise _broken(path, line, f"the item that begins here is not JSON: {error}") from error
            more = file.read(max(_CHUNK_CHARS, len(buffer) - at))
            buffer, at, is_whole = buffer[at:] + more, 0, not more
            continue
        yield line, item
        line += buffer.count("\n", at, stop)
        at, expected = stop, ","


def _broken(path: Path, line: int, reason: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {reason}; what follows cannot be read")


def _found(item: object, reader: LineReader) -> Read:
    return lambda line: reader.sample(item, line)


def _refuse(reason: str) -> Read:
    def read(_line: int) -> Sample:
        raise LineError(reason)

    return read


def _csv(path: Path, reader: LineReader) -> Iterator[tuple[int, Read]]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file)
        columns = _columns(next(rows), path)
        clock = _TraceClock()
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield rows.line_num, _refuse(str(error))
                continue
            if row:
                yield rows.line_num, _trace_row(row, columns, clock, reader)


def _columns(row: list[str], path: Path) -> tuple[int, int, int]:
    head = [name.lower().replace("_", "").replace(" ", "") for name in row]
    time_at, input_at, output_at = (
        next((head.index(name) for name in names if name in head), None)
        for names in (_TIME_COLUMNS, _INPUT_COLUMNS, _OUTPUT_COLUMNS)
    )
    if time_at is None or input_at is None or output_at is None:
        raise ConfigError(
            f"{path}:1: the columns are {', '.join(row)}: a trace needs a timestamp, context (or request) tokens and "
            "generated (or response) tokens"
        )
    return time_at, input_at, output_at


class _TraceClock:
    """Turns a trace's moments, dates or seconds, into seconds since its first good line."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def since_first_s(self, text: str) -> float:
        try:
            moment_s = float(text)
        except ValueError:
            try:
                moment_s = datetime.fromisoformat(text.strip()).timestamp()
            except ValueError:
                raise LineError(f"timestamp is {text!r}, a date or seconds are needed") from None
        if not math.isfinite(moment_s):
            raise LineError(f"timestamp is {text!r}, a date or seconds are needed")
        if self._first_s is None:
            self._first_s = moment_s
        if moment_s < self._first_s:
            raise LineError(f"timestamp {text!r} lies before the first line's")
        return moment_s - self._first_s


def _trace_row(row: list[str], columns: tuple[int, int, int], clock: _TraceClock, reader: LineReader) -> Read:
    def read(line: int) -> Sample:
        if len(row) <= max(columns):
            raise LineError(f"has {len(row)} columns, at least {max(columns) + 1} are needed")
        counts = []
        for name, at in (("input", columns[1]), ("output", columns[2])):
            try:
                count = int(row[at])
            except ValueError:
                count = 0
            if not 1 <= count <= MAX_TRACE_TOKENS:
                raise LineError(f"{name} tokens are {row[at]!r}, a whole number from 1 to {MAX_TRACE_TOKENS} is needed")
            counts.append(count)
        at_s = clock.since_first_s(row[columns[0]])
        return reader.trace_sample(counts[0], counts[1], at_s=at_s, line=line, blocks=[])

    return read
