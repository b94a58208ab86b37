"""Fetches models from a Hugging Face hub over HTTP: one listing, then each file, resumed after cuts and hashed.

The endpoint is ``HF_ENDPOINT`` (a mirror, or a stub in tests). The token goes to that host only: it is dropped when a
download is redirected to another one. Everything the server says is checked; only files that cannot run code are asked
for.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from headrace.base.errors import ConfigError, ModelIntegrityError, SourceError
from headrace.registry.cache import Progress, require_space
from headrace.registry.files import check_name, sha256_of
from headrace.registry.selection import choose_files, is_beside

_T = TypeVar("_T")

DEFAULT_ENDPOINT = "https://huggingface.co"
_MAX_LISTING_BYTES = 16 * 2**20
_CHUNK_BYTES = 256 * 2**10
_MAX_FAILURES = 5
"""In a row without a new byte; 1 + 2 + 4 + 8 s of waiting between them."""


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    blobId: str | None = None  # noqa: N815  # the hub's own key
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a snapshot. Large files have a SHA-256, small ones git's blob hash."""

    name: str
    size_bytes: int
    sha256: str | None
    blob_sha1: str | None


@dataclass(frozen=True, slots=True)
class Hub:
    """Where to ask and how. ``timeout_s`` is the longest silence on a connection; ``sleep`` waits between tries."""

    endpoint: str
    token: str | None = None
    timeout_s: float = 30.0
    sleep: Callable[[float], None] = time.sleep

    def list_files(self, repository: str, revision: str, wanted: str | None) -> tuple[str, list[HubFile]]:
        """Returns the commit that ``revision`` names now and the model's files in it.

        Raises:
            SourceError: unknown repository or revision, no access, or no answer.
            ModelUnsupportedError: the repository has no usable weights.
        """
        what = f"hf:{repository}@{revision}"
        quoted = urllib.parse.quote(revision, safe="")
        url = f"{self.endpoint}/api/models/{repository}/revision/{quoted}?blobs=true"
        raw = self._retried(lambda: self._read(url, what), what)
        try:
            listing = msgspec.json.decode(raw, type=_Listing)
        except msgspec.MsgspecError as error:
            raise SourceError(f"{what}: the hub's listing is malformed: {error}") from error
        if not listing.sha.isalnum() or len(listing.sha) > 64:
            raise SourceError(f"{what}: the hub names the commit {listing.sha[:80]!r}")
        top = {entry.rfilename: entry for entry in listing.siblings if is_beside(entry.rfilename)}
        files = []
        for name in choose_files(top, what, wanted):
            entry = top[check_name(name, what)]
            size = entry.lfs.size if entry.lfs else entry.size
            if size is None or size < 0:
                raise SourceError(f"{what}: the hub gives no size for {name}")
            files.append(HubFile(name, size, entry.lfs.sha256 if entry.lfs else None, entry.blobId))
        return listing.sha, files

    def download(self, repository: str, commit: str, file: HubFile, folder: Path, progress: Progress) -> None:
        """Fetches one file into ``folder``; goes on where an earlier try left its ``.partial``.

        Raises:
            SourceError: the hub refuses, or the connection fails too often.
            ModelIntegrityError: the whole file has other bytes than the hub's listing says.
        """
        target = folder / file.name
        what = f"hf:{repository}@{commit[:12]}: {file.name}"
        partial = folder / f"{file.name}.partial"
        partial.parent.mkdir(exist_ok=True)
        if target.exists() and _is_as_listed(target, file):
            progress(file.name, file.size_bytes, file.size_bytes)
            return
        url = f"{self.endpoint}/{repository}/resolve/{commit}/{urllib.parse.quote(file.name)}"
        if partial.exists() and partial.stat().st_size > file.size_bytes:
            partial.unlink()

        def fetch_rest() -> None:
            have = partial.stat().st_size if partial.exists() else 0
            if have < file.size_bytes or not partial.exists():
                self._append(
                    url, what, partial, have, file.size_bytes, lambda n: progress(file.name, n, file.size_bytes)
                )

        self._retried(fetch_rest, what, size_of=lambda: partial.stat().st_size if partial.exists() else 0)
        if not _is_as_listed(partial, file):
            found = sha256_of(partial)
            partial.unlink()
            listed = f"SHA-256 {file.sha256}" if file.sha256 else f"git blob {file.blob_sha1}"
            raise ModelIntegrityError(
                f"{what}: arrived with SHA-256 {found}, the hub lists {listed}: damaged on the way; pull again"
            )
        partial.replace(target)

    def _append(
        self, url: str, what: str, partial: Path, have: int, size_bytes: int, progress: Callable[[int], None]
    ) -> None:
        headers = {"Range": f"bytes={have}-"} if have else {}
        with self._open(url, what, headers) as response:
            if have and response.status == 206:
                start = _range_start(response.headers.get("Content-Range", ""))
                if start != have:
                    raise SourceError(f"{what}: asked for byte {have}, the server sends from {start}")
            mode = "ab" if have and response.status == 206 else "wb"
            done = have if mode == "ab" else 0
            progress(done)
            with partial.open(mode) as out:
                while chunk := response.read1(_CHUNK_BYTES):
                    done += len(chunk)
                    if done > size_bytes:
                        raise SourceError(f"{what}: the server sends more than the {size_bytes} bytes that it lists")
                    out.write(chunk)
                    progress(done)
        if done < size_bytes:
            raise _CutError(f"the connection ended after {done} of {size_bytes} bytes")

    def _read(self, url: str, what: str) -> bytes:
        with self._open(url, what, {}) as response:
            raw: bytes = response.read(_MAX_LISTING_BYTES + 1)
        if len(raw) > _MAX_LISTING_BYTES:
            raise SourceError(f"{what}: the hub's listing is over {_MAX_LISTING_BYTES} bytes")
        return raw

    def _open(self, url: str, what: str, headers: dict[str, str]) -> Any:
        # The endpoint's scheme was checked when the hub was made, redirects are checked by _Redirects.
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", **headers})  # noqa: S310
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(_Redirects(self.endpoint, self.token))
        try:
            return opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error.code, what, has_token=self.token is not None) from error

    def _retried(self, action: Callable[[], _T], what: str, size_of: Callable[[], int] = lambda: 0) -> _T:
        """Runs ``action`` until it works; progress (by ``size_of``) starts the count of failures anew."""
        failures, size = 0, size_of()
        while True:
            try:
                return action()
            except (OSError, http.client.HTTPException, _CutError, _BusyError) as error:
                failures = 1 if size_of() > size else failures + 1
                size = size_of()
                if failures >= _MAX_FAILURES:
                    raise SourceError(f"{what}: gave up after {failures} tries in a row: {_reason(error)}") from error
                self.sleep(float(2 ** (failures - 1)))


class _CutError(Exception):
    """The connection ended early; the rest can be asked for."""


class _BusyError(Exception):
    """The server asks to come back later."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP(S) and keeps range and token where they belong."""

    def __init__(self, endpoint: str, token: str | None) -> None:
        self._endpoint = urllib.parse.urlsplit(endpoint)
        self._token = token

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Returns the next request; the token only follows to the endpoint's own host."""
        target = urllib.parse.urlsplit(newurl)
        is_downgrade = self._endpoint.scheme == "https" and target.scheme != "https"
        if target.scheme not in ("http", "https") or is_downgrade:
            raise SourceError(f"the hub redirects to {target.scheme}://, which is not followed")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and self._token and target[:2] == self._endpoint[:2]:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return request


def hub_from_environment(sleep: Callable[[float], None] = time.sleep) -> Hub:
    """Returns the hub that ``HF_ENDPOINT`` names, with the user's token (``HF_TOKEN`` or the hub login's).

    Raises:
        ConfigError: the endpoint is not an http or https address.
    """
    endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
    parts = urllib.parse.urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"HF_ENDPOINT is {endpoint!r}; it should be an http:// or https:// address")
    # Late: the library takes a third of a second to import and is needed for its token file only.
    from huggingface_hub import get_token

    return Hub(endpoint, get_token(), sleep=sleep)


def fetch_hub(hub: Hub, repository: str, revision: str, wanted: str | None, folder: Path, progress: Progress) -> str:
    """Fetches a model's files into ``folder`` and returns the commit. What is there already is kept if it is right."""
    progress(f"hf:{repository}", 0, None)
    commit, files = hub.list_files(repository, revision, wanted)
    names = {file.name for file in files}
    present = [path for path in folder.rglob("*") if not path.is_dir()]
    for path in present:
        if str(path.relative_to(folder)).removesuffix(".partial") not in names:
            path.unlink()
    have = sum(path.stat().st_size for path in present if path.exists())
    require_space(folder, max(0, sum(file.size_bytes for file in files) - have))
    for file in files:
        hub.download(repository, commit, file, folder, progress)
    return commit


def _is_as_listed(path: Path, file: HubFile) -> bool:
    if path.stat().st_size != file.size_bytes:
        return False
    if file.sha256 is not None:
        return sha256_of(path) == file.sha256
    if file.blob_sha1 is not None:
        # Git's identity of small files; not a security boundary, the transport is.
        sha1 = hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
        sha1.update(path.read_bytes())
        return sha1.hexdigest() == file.blob_sha1
    return True


def _range_start(content_range: str) -> int:
    unit, _, rest = content_range.partition(" ")
    start = rest.partition("-")[0]
    return int(start) if unit == "bytes" and start.isdecimal() else -1


def _refusal(status: int, what: str, *, has_token: bool) -> Exception:
    if status in (401, 403):
        how = "this token has no access" if has_token else "set HF_TOKEN to a token that has access"
        return SourceError(
            f"{what}: HTTP {status}: private, gated or not there; accept its licence on the hub, and {how}"
        )
    if status == 404:
        return SourceError(f"{what}: HTTP 404: there is no such repository, revision or file")
    if status in (408, 425, 429) or status >= 500:
        return _BusyError(f"HTTP {status}")
    if status == 416:
        return SourceError(f"{what}: HTTP 416: the file changed while it was fetched; pull again")
    return SourceError(f"{what}: HTTP {status}")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", error)) or type(error).__name__
