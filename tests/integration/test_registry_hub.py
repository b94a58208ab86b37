"""``hf:`` sources against a loopback stub of a hub: cuts, lies, refusals, redirects, stalls."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from headrace.base.errors import ConfigError, ModelIntegrityError, ModelUnsupportedError, SourceError
from headrace.registry.cache import list_models, lookup
from headrace.registry.hub import Hub, fetch_hub, hub_from_environment
from headrace.registry.model import open_model
from headrace.registry.sources import resolve
from headrace.testing.tiny import write_tiny_llama

COMMIT = "c0ffee0123456789c0ffee0123456789c0ffee01"


@dataclass
class StubHub:
    """A hub with one repository, ``org/tiny``, and faults to order."""

    files: dict[str, bytes]
    url: str = ""
    cut_after_bytes: int | None = None
    num_cuts: int = 0
    num_busy: int = 0
    num_stalls: int = 0
    refuse_status: int | None = None
    ignores_ranges: bool = False
    has_lying_hashes: bool = False
    redirect_to: str | None = None
    listing_body: bytes | None = None
    size_lie: int = 0
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)

    def listing(self) -> bytes:
        if self.listing_body is not None:
            return self.listing_body
        siblings: list[dict[str, object]] = []
        for name, content in self.files.items():
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name.endswith((".safetensors", ".gguf")):
                sha256 = "0" * 64 if self.has_lying_hashes else hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content) + self.size_lie, "pointerSize": 134}
            siblings.append(entry)
        return json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False}).encode()

    def ranges_of(self, name: str) -> list[str | None]:
        return [asked for path, asked, _ in self.requests if path.endswith(name)]


class Handler(http.server.BaseHTTPRequestHandler):
    hub: StubHub

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((path, self.headers.get("Range"), self.headers.get("Authorization")))
        if hub.refuse_status is not None:
            self.answer(hub.refuse_status, b"no")
        elif path == "/api/models/org/tiny/revision/main":
            self.answer(200, hub.listing())
        elif path.removeprefix(f"/org/tiny/resolve/{COMMIT}/") in hub.files:
            self.send_file(path.removeprefix(f"/org/tiny/resolve/{COMMIT}/"))
        else:
            self.answer(404, b"not found")

    def send_file(self, name: str) -> None:
        hub, content = self.hub, self.hub.files[name]
        if hub.redirect_to is not None:
            self.send_response(302)
            self.send_header("Location", f"{hub.redirect_to}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        is_weights = name.endswith(".safetensors")
        if is_weights and hub.num_busy:
            hub.num_busy -= 1
            self.answer(503, b"busy")
            return
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not hub.ignores_ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        if is_weights and hub.num_stalls:
            hub.num_stalls -= 1
            self.wfile.write(body[:1000])
            self.wfile.flush()
            hub.release.wait(10)
            self.close_connection = True
        elif is_weights and hub.num_cuts:
            hub.num_cuts -= 1
            self.wfile.write(body[: hub.cut_after_bytes])
            self.close_connection = True
        else:
            self.wfile.write(body)

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def serve(hub: StubHub) -> Iterator[StubHub]:
    handler = type("BoundHandler", (Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    hub.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "README.md": b"# tiny",
        "pytorch_model.bin": b"\x80\x04pickle",
    }


@pytest.fixture
def stub(model_bytes: dict[str, bytes]) -> Iterator[StubHub]:
    yield from serve(StubHub(dict(model_bytes)))


@pytest.fixture
def other_host(model_bytes: dict[str, bytes]) -> Iterator[StubHub]:
    yield from serve(StubHub(dict(model_bytes)))


def fetch(stub: StubHub, folder: Path, *, waits: list[float] | None = None, timeout_s: float = 10.0) -> str:
    folder.mkdir(exist_ok=True)
    hub = Hub(stub.url, token="secret", timeout_s=timeout_s, sleep=(waits if waits is not None else []).append)
    return fetch_hub(hub, "org/tiny", "main", None, folder, lambda name, done, total: None)


def test_resolve_fetches_publishes_and_then_needs_no_network(
    stub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", stub.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen: dict[str, int] = {}

    def note(name: str, done: int, total: int | None) -> None:
        seen[name] = done

    path = resolve("hf:org/tiny", cache=tmp_path, progress=note)
    num_requests = len(stub.requests)
    again = resolve("hf:org/tiny", cache=tmp_path, progress=note)

    assert again == path
    assert len(stub.requests) == num_requests
    assert open_model(path).config["model_type"] == "llama"
    assert not (path / "README.md").exists()
    assert not (path / "pytorch_model.bin").exists()
    assert seen["model.safetensors"] == len(stub.files["model.safetensors"])
    assert [model.revision for model in list_models(tmp_path)] == [COMMIT]


def test_the_pooling_comes_along_and_stays_where_it_was(
    stub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", stub.url)
    stub.files["1_Pooling/config.json"] = b'{"pooling_mode_cls_token": true}'
    stub.files["onnx/config.json"] = stub.files["2_Other/model.safetensors"] = b"{}"
    stub.files["modules.json"] = b'[{"type": "a.Pooling", "path": "1_Pooling"}]'

    path = resolve("hf:org/tiny", cache=tmp_path, progress=lambda name, done, total: None)

    assert open_model(path).pooling == {"pooling_mode_cls_token": True}
    assert not (path / "onnx").exists()
    assert not (path / "2_Other").exists()


def test_a_cut_download_goes_on_where_it_stopped(stub: StubHub, tmp_path: Path) -> None:
    stub.cut_after_bytes, stub.num_cuts = 30_000, 3

    fetch(stub, tmp_path / "m")

    assert (tmp_path / "m" / "model.safetensors").read_bytes() == stub.files["model.safetensors"]
    assert stub.ranges_of("model.safetensors") == [None, "bytes=30000-", "bytes=60000-", "bytes=90000-"]


def test_an_interrupted_pull_goes_on_in_the_next_process(stub: StubHub, tmp_path: Path) -> None:
    stub.cut_after_bytes, stub.num_cuts = 0, 99
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.partial").write_bytes(stub.files["model.safetensors"][:50_000])
    with pytest.raises(SourceError):
        fetch(stub, folder)
    stub.num_cuts = 0

    fetch(stub, folder)

    assert stub.ranges_of("model.safetensors")[-1] == "bytes=50000-"
    assert (folder / "model.safetensors").read_bytes() == stub.files["model.safetensors"]


def test_a_server_that_ignores_ranges_sends_the_file_anew(stub: StubHub, tmp_path: Path) -> None:
    stub.cut_after_bytes, stub.num_cuts, stub.ignores_ranges = 30_000, 1, True

    fetch(stub, tmp_path / "m")

    assert (tmp_path / "m" / "model.safetensors").read_bytes() == stub.files["model.safetensors"]


def test_endless_cuts_end_in_a_source_error_after_growing_waits(stub: StubHub, tmp_path: Path) -> None:
    stub.cut_after_bytes, stub.num_cuts = 0, 99
    waits: list[float] = []

    with pytest.raises(SourceError, match="gave up after 5 tries"):
        fetch(stub, tmp_path / "m", waits=waits)

    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_busy_server_is_asked_again(stub: StubHub, tmp_path: Path) -> None:
    stub.num_busy = 2
    waits: list[float] = []

    fetch(stub, tmp_path / "m", waits=waits)

    assert waits == [1.0, 2.0]


def test_a_stalled_connection_is_given_up_and_resumed(stub: StubHub, tmp_path: Path) -> None:
    stub.num_stalls = 1

    fetch(stub, tmp_path / "m", timeout_s=0.3)

    assert (tmp_path / "m" / "model.safetensors").read_bytes() == stub.files["model.safetensors"]
    assert stub.ranges_of("model.safetensors")[1] is not None


def test_wrong_bytes_are_refused_and_not_kept(stub: StubHub, tmp_path: Path) -> None:
    stub.has_lying_hashes = True

    with pytest.raises(ModelIntegrityError, match=r"model\.safetensors: arrived with SHA-256"):
        fetch(stub, tmp_path / "m")

    assert not list((tmp_path / "m").glob("model.safetensors*"))


def test_a_damaged_partial_is_found_by_its_hash(stub: StubHub, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors.partial").write_bytes(bytes(50_000))
    with pytest.raises(ModelIntegrityError):
        fetch(stub, folder)

    fetch(stub, folder)

    assert (folder / "model.safetensors").read_bytes() == stub.files["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "words"), [(404, "no such repository"), (401, "gated"), (403, "gated"), (400, "HTTP 400")]
)
def test_refusals_say_what_to_do(stub: StubHub, tmp_path: Path, status: int, words: str) -> None:
    stub.refuse_status = status

    with pytest.raises(SourceError, match=words):
        fetch(stub, tmp_path / "m")

    assert len(stub.requests) == 1


def test_an_unknown_revision_is_a_source_error(stub: StubHub, tmp_path: Path) -> None:
    hub = Hub(stub.url)

    with pytest.raises(SourceError, match="404"):
        fetch_hub(hub, "org/tiny", "v9", None, tmp_path, lambda name, done, total: None)


def test_the_token_does_not_follow_to_another_host(stub: StubHub, other_host: StubHub, tmp_path: Path) -> None:
    stub.redirect_to = other_host.url

    fetch(stub, tmp_path / "m")

    assert all(token == "Bearer secret" for _, _, token in stub.requests)
    assert other_host.requests
    assert all(token is None for _, _, token in other_host.requests)


@pytest.mark.parametrize(("target", "words"), [("file://", "HTTP 302"), ("ftp://127.0.0.1:9", "redirects to ftp")])
def test_a_redirect_away_from_http_is_not_followed(stub: StubHub, tmp_path: Path, target: str, words: str) -> None:
    stub.redirect_to = target

    with pytest.raises(SourceError, match=words):
        fetch(stub, tmp_path / "m")


def test_a_repository_with_pickles_only_is_refused_before_any_download(stub: StubHub, tmp_path: Path) -> None:
    del stub.files["model.safetensors"]

    with pytest.raises(ModelUnsupportedError, match=r"pytorch_model\.bin"):
        fetch(stub, tmp_path / "m")

    assert len(stub.requests) == 1


def test_names_that_leave_the_folder_are_never_asked_for(stub: StubHub, tmp_path: Path) -> None:
    stub.files["../../evil.json"] = b"{}"
    stub.files[".hidden.json"] = b"{}"

    with pytest.raises(ModelIntegrityError, match="hidden"):
        fetch(stub, tmp_path / "m")


def test_a_failed_fetch_leaves_no_model_behind(stub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", stub.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    stub.has_lying_hashes = True

    with pytest.raises(ModelIntegrityError):
        resolve("hf:org/tiny", cache=tmp_path, progress=lambda name, done, total: None)

    assert lookup(tmp_path, "hf:org/tiny") is None
    assert list_models(tmp_path) == []


def test_an_endpoint_that_is_no_web_address_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")

    with pytest.raises(ConfigError, match="HF_ENDPOINT"):
        hub_from_environment()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "malformed"),
        (b'{"sha":"abc"}', "malformed"),
        (b'{"sha":"../../x","siblings":[]}', "names the commit"),
        (b'{"sha":"abc","siblings":[{"rfilename":"model.safetensors"}]}', "no size"),
        (b'{"sha":"abc","siblings":[{"rfilename":"model.safetensors","size":-5}]}', "no size"),
    ],
)
def test_a_listing_that_lies_is_a_source_error(stub: StubHub, tmp_path: Path, body: bytes, words: str) -> None:
    stub.listing_body = body

    with pytest.raises(SourceError, match=words):
        fetch(stub, tmp_path / "m")


@pytest.mark.parametrize(("size_lie", "words"), [(-1, "sends more than"), (1, "gave up after 5 tries")])
def test_a_file_of_another_size_than_listed_is_refused(
    stub: StubHub, tmp_path: Path, size_lie: int, words: str
) -> None:
    stub.size_lie = size_lie

    with pytest.raises(SourceError, match=words):
        fetch(stub, tmp_path / "m")
