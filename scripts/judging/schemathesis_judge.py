"""schemathesis on our own ``/openapi.json``, for chat and for vectors, and on OpenAI's, where its path is given.

Checked: no server error, no answer that the document does not describe, and that every operation answered 200 at least
once: a run in which everything is refused says nothing. Each operation runs by itself for a bounded time.

OpenAI's document (openapi.json of openai/openai-openapi) is cut to the paths that are ours and narrowed to our ranges.
Waivers are written into the cut for what it lacks and its own service sends: vectors as base64, event
streams, and null for the first token of an echoed prompt, which has no log-probability.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from judging.documents import Served, cut, narrowed, waived, within
from judging.environment import FOLDER, python_with, version_of
from judging.findings import Report
from judging.servers import Server

from headrace.protocol import unsupported

PACKAGES: Final = ("schemathesis==4.32.5",)
CHECKS: Final = "not_a_server_error,response_schema_conformance,content_type_conformance"
OWN_PATHS: Final = (
    "/v1/chat/completions", "/v1/chat/completions/input_tokens", "/v1/completions", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info",
)  # fmt: skip
OWN_VECTOR_PATHS: Final = (
    "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/embed", "/embed_all", "/similarity", "/v1/pooling",
    "/tokenize",
)  # fmt: skip
OPENAI_PATHS: Final = ("/chat/completions", "/completions", "/models")
OPENAI_VECTOR_PATHS: Final = ("/embeddings",)
# An operation may take so long, and so much more for each example.
_START_S: Final = 120.0
_EXAMPLE_S: Final = 2.0
# The judges of our own document, and the server that each asks.
OWN: Final = {"schemathesis": "chat", "schemathesis-vectors": "vectors"}
# The judge of OpenAI's, which asks both.
OPENAI: Final = "schemathesis-openai"


def run_own(name: str, servers: Mapping[str, Server], *, max_examples: int) -> Report:
    """Runs one of the judges of our own document with so many examples for each operation."""
    judge = _Judge(name, max_examples)
    kind = OWN[name]
    server = servers[kind]
    document = cut(_document_of(server), OWN_PATHS if kind == "chat" else OWN_VECTOR_PATHS)
    judge.ask(server, "own", narrowed(document, _served(server, kind)), "")
    return judge.report


def run_openai(servers: Mapping[str, Server], *, max_examples: int, document_path: Path) -> Report:
    """Runs the judge of OpenAI's document."""
    judge = _Judge(OPENAI, max_examples)
    whole = json.loads(document_path.read_text())
    for kind, paths in (("chat", OPENAI_PATHS), ("vectors", OPENAI_VECTOR_PATHS)):
        server = servers[kind]
        document = within(waived(cut(whole, paths)), _document_of(server), "/v1", unsupported.GENERATE)
        judge.ask(server, f"OpenAI's, {kind}", narrowed(document, _served(server, kind)), "/v1")
    return judge.report


def _served(server: Server, kind: str) -> Served:
    return Served(server.model, _width(server) if kind == "vectors" else 0)


def _document_of(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/openapi.json", timeout=30) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def _width(server: Server) -> int:
    """Gives how many numbers a vector of the server's has."""
    body = json.dumps({"model": server.model, "input": "width"}).encode()
    request = urllib.request.Request(server.url + "/v1/embeddings", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return len(json.load(answer)["data"][0]["embedding"])


class _Judge:
    """Runs each operation of a document by itself: one that takes too long costs no other."""

    def __init__(self, name: str, max_examples: int) -> None:
        self._python = python_with("schemathesis", PACKAGES)
        self._max_examples = max_examples
        self.report = Report(name, version_of(self._python, "schemathesis"))

    def ask(self, server: Server, what: str, document: dict[str, Any], prefix: str) -> None:
        """Runs a document's operations on a server.

        Args:
            prefix: what stands before the document's paths there.
        """
        report = self.report
        path = FOLDER / f"{report.judge}-{re.sub('[^a-z]+', '-', what.lower())}.json"
        path.write_text(json.dumps(document))
        log = path.with_suffix(".log")
        log.write_text("")
        for route in document["paths"]:
            before = _statuses(server, prefix + route)
            began_s = time.monotonic()
            is_good, said = _run(self._python, server.url + prefix, path, route, self._max_examples)
            took_s = time.monotonic() - began_s
            with log.open("a") as out:
                out.write(f"--- {route}, {took_s:.0f} s\n{said}\n")
            found = _statuses(server, prefix + route) - before
            cases = re.search(r"(\d+) generated", said)
            name = f"{what} {route}: {cases.group(1) if cases else '?'} cases in {took_s:.0f} s, {_shown(found)}"
            print(name, file=sys.stderr, flush=True)
            report.notes.append(name)
            report.add(name, is_good, _failures(said))
            if not found["200"]:
                report.add(f"{what} {route}: answered", is_ok=False, why="the operation refused every example")
            errors = sum(count for status, count in found.items() if status >= "500")
            if errors:
                report.add(f"{what} {route}: no server error", is_ok=False, why=f"{errors} answers of 500 or more")


def _run(python: Path, url: str, path: Path, route: str, max_examples: int) -> tuple[bool, str]:
    """Gives whether all was well, and what was said."""
    limit_s = _START_S + _EXAMPLE_S * max_examples
    try:
        done = subprocess.run(
            [
                str(python.with_name("schemathesis")), "run", str(path), "--url", url, "--include-path", route,
                "--mode", "positive", "--phases", "examples,coverage,fuzzing",
                "--checks", CHECKS, "--max-examples", str(max_examples), "--seed", "1", "--continue-on-failure",
                "--request-timeout", "120", "--no-color",
            ],
            cwd=FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as cut_off:
        said = (cut_off.stdout or b"").decode("utf-8", "replace")
        return False, f"{said}\ncut after {limit_s:g} s"
    return done.returncode == 0, done.stdout


def _statuses(server: Server, route: str) -> Counter[str]:
    """Gives how often a route has answered with each status."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    pattern = rf'headrace_http_responses_total\{{route="{re.escape(route)}",status="(\d+)"\}} (\d+)'
    return Counter({status: int(count) for status, count in re.findall(pattern, text)})


def _shown(found: Counter[str]) -> str:
    return ", ".join(f"{count} × {status}" for status, count in sorted(found.items())) or "no answer"


def _failures(said: str) -> str:
    """Gives what was found: the part between its heading and the warnings."""
    return said.partition("= FAILURES =")[2].partition("= WARNINGS =")[0].strip(" =\n")[:2000] or said[-600:]
