"""The results as a file: versioned JSON, one sample a measurement, appended to by later sessions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec

SCHEMA = 1


class Entry(msgspec.Struct, frozen=True):
    """One engine with one format of one model.

    Args:
        bits: of the weight files, per weight.
    """

    model: str
    engine: str
    format: str
    bits: float


class Sample(msgspec.Struct, frozen=True):
    """One measurement.

    Args:
        session, round: rounds count within a session; a ratio is taken within one round.
        value: in the cell's unit; None where the engine could not, and ``error`` says why.
        wall_s: what the measurement took.
        bandwidth_before, bandwidth_after: bytes per second of two threads, probed just before and after.
        load: the machine's load average at the end.
    """

    session: int
    round: int
    model: str
    engine: str
    format: str
    cell: str
    value: float | None
    wall_s: float
    bandwidth_before: float
    bandwidth_after: float
    load: float
    error: str = ""

    @property
    def bandwidth(self) -> float:
        """The mean of both probes."""
        return (self.bandwidth_before + self.bandwidth_after) / 2


class Limit(msgspec.Struct, frozen=True):
    """What a session's machine could do at best in a cell with our format; ``bandwidth`` and ``peak`` were probed."""

    session: int
    model: str
    format: str
    cell: str
    value: float
    bandwidth: float
    peak: float
    arithmetic: str


class Quality(msgspec.Struct, frozen=True):
    """What a format costs: mean KL in nats and top-1 of a decoder, least and mean cosine of an encoder.

    Args:
        what: how it was measured, where that is not the engine's own output.
    """

    model: str
    engine: str
    format: str
    positions: int
    kl_mean: float | None = None
    top1_ratio: float | None = None
    cosine_min: float | None = None
    cosine_mean: float | None = None
    what: str = ""


class Session(msgspec.Struct, frozen=True):
    """When, where and with what a session ran."""

    started_at: str
    commit: str
    cpu: str
    cores: int
    threads: int
    isa: str
    memory_bytes: int
    system: str
    versions: dict[str, str]
    missing: list[str]


class Results(msgspec.Struct):
    """The whole file."""

    schema: int = SCHEMA
    sessions: list[Session] = []
    entries: list[Entry] = []
    samples: list[Sample] = []
    limits: list[Limit] = []
    quality: list[Quality] = []

    def remember(self, entry: Entry) -> None:
        """Adds it, in the place of what was known of the same engine and format."""
        key = (entry.model, entry.engine, entry.format)
        self.entries = [old for old in self.entries if (old.model, old.engine, old.format) != key] + [entry]

    def judge(self, quality: Quality) -> None:
        """Adds it, in the place of an earlier one."""
        key = (quality.model, quality.engine, quality.format)
        self.quality = [old for old in self.quality if (old.model, old.engine, old.format) != key] + [quality]


def read(path: Path) -> Results:
    """Returns what the file holds; an empty value where there is none.

    Raises:
        SystemExit: it is no such file, or of another version.
    """
    if not path.exists():
        return Results()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise SystemExit(f"{path}: {error}") from error
    if found.schema != SCHEMA:
        raise SystemExit(f"{path} has schema {found.schema}, this harness writes {SCHEMA}")
    return found


def write(path: Path, results: Results) -> None:
    """Writes the file, whole or not at all: one entry a line, so that changes read well."""
    fields = json.loads(msgspec.json.encode(results))
    parts = [f'"schema": {SCHEMA}']
    for name, items in fields.items():
        if name != "schema":
            lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
            parts.append(f'"{name}": [\n{lines}\n]')
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("{" + ",\n".join(parts) + "}\n")
    os.replace(part, path)
