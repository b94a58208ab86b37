"""schemathesis on our own ``/openapi.json``, and on OpenAI's document where its path is given.

Checked: no server error, no answer that the document does not describe, and that every operation answered 200 at least
once: a run in which everything is refused says nothing. No document can know what is served, or what an example costs:
``model`` is narrowed to the served name, and the number of tokens to a few.

OpenAI's document (openapi.json of openai/openai-openapi) is cut to the paths that are ours. Two waivers are written
into the cut: vectors as base64, and event streams of text completions, which it lacks and its own service sends.
"""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from judging.environment import FOLDER, python_with, version_of
from judging.findings import Report
from judging.servers import Server

PACKAGES = ("schemathesis==4.32.5",)
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
OWN_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/models", "/tokenize",
    "/detokenize", "/tokenizer_info",
)  # fmt: skip
OWN_VECTOR_PATHS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score", "/embed", "/v1/pooling", "/tokenize")
OPENAI_PATHS = ("/chat/completions", "/completions", "/models")
OPENAI_VECTOR_PATHS = ("/embeddings",)
# A request has one of these; an answer, which may have a model too, has none.
_ASKED = {"messages", "prompt", "input", "inputs", "query", "text_1", "tokens"}
_MAX_TOKENS = 8
_TIMEOUT_S = 3600


def run(servers: Mapping[str, Server], max_examples: int, openai_document: Path | None = None) -> Report:
    """Runs it with so many examples for each operation."""
    python = python_with("schemathesis", PACKAGES)
    report = Report("schemathesis", version_of(python, "schemathesis"))
    for kind, paths in (("chat", OWN_PATHS), ("vectors", OWN_VECTOR_PATHS)):
        server = servers[kind]
        with urllib.request.urlopen(server.url + "/openapi.json", timeout=30) as answer:
            document = json.load(answer)
        _judge(report, python, server, f"own, {kind}", cut(document, paths, server.model), "", max_examples)
    if openai_document is not None:
        for kind, paths in (("chat", OPENAI_PATHS), ("vectors", OPENAI_VECTOR_PATHS)):
            server = servers[kind]
            document = waived(cut(json.loads(openai_document.read_text()), paths, server.model))
            _judge(report, python, server, f"OpenAI's, {kind}", document, "/v1", max_examples)
    return report


def cut(document: dict[str, Any], paths: tuple[str, ...], model: str) -> dict[str, Any]:
    """Keeps the operations that are asked for and what they point to, for this model and a few tokens."""
    kept: dict[str, Any] = {path: document["paths"][path] for path in paths}
    if "get" in kept.get("/chat/completions", {}):
        kept["/chat/completions"] = {"post": kept["/chat/completions"]["post"]}  # no list of stored ones here
    components: dict[str, dict[str, Any]] = {}
    todo: list[Any] = [kept]
    while todo:
        for kind, name in re.findall(r'"#/components/(\w+)/([^"/]+)', json.dumps(todo.pop())):
            if name not in components.setdefault(kind, {}):
                components[kind][name] = document["components"][kind][name]
                todo.append(components[kind][name])
    out = json.loads(json.dumps({**document, "paths": kept, "components": components}))
    out.pop("webhooks", None)
    out.pop("security", None)
    _narrow(out, model)
    return out


def waived(document: dict[str, Any]) -> dict[str, Any]:
    """Writes the two waivers into a cut of OpenAI's document."""
    schemas = document["components"]["schemas"]
    if "Embedding" in schemas:
        vector = schemas["Embedding"]["properties"]["embedding"]
        schemas["Embedding"]["properties"]["embedding"] = {"anyOf": [vector, {"type": "string"}]}
    if "/completions" in document["paths"]:
        document["paths"]["/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"] = {"schema": {}}
    return document


def _narrow(value: Any, model: str) -> None:
    if isinstance(value, list):
        for item in value:
            _narrow(item, model)
    if not isinstance(value, dict):
        return
    fields = value.get("properties")
    # An answer has a model too, but with others of these.
    if isinstance(fields, dict) and {"messages", "prompt", "input", "inputs", "query", "text_1", "tokens"} & set(
        fields
    ):
        if "model" in fields:
            fields["model"] = {"const": model}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in fields:
                fields[name] = {"type": "integer", "minimum": 1, "maximum": _MAX_TOKENS}
                value["required"] = sorted({*value.get("required", []), name})
        fields.pop("min_tokens", None)
    for item in value.values():
        _narrow(item, model)


def _judge(
    report: Report,
    python: Path,
    server: Server,
    what: str,
    document: dict[str, Any],
    prefix: str,
    max_examples: int,
) -> None:
    path = FOLDER / f"schemathesis-{re.sub('[^a-z]+', '-', what.lower())}.json"
    path.write_text(json.dumps(document))
    before = _answered(server)
    done = subprocess.run(
        [
            str(python.with_name("schemathesis")), "run", str(path), "--url", server.url + prefix,
            "--mode", "positive", "--phases", "examples,coverage,fuzzing",
            "--checks", CHECKS, "--max-examples", str(max_examples), "--seed", "1", "--continue-on-failure",
            "--request-timeout", "120",
        ],
        cwd=FOLDER, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    path.with_suffix(".log").write_text(said + done.stderr)
    after = _answered(server)
    cases = re.search(r"(\d+) generated", said)
    name = f"{what}: {cases.group(1) if cases else '?'} cases of {max_examples} an operation"
    report.add(name, done.returncode == 0, _failures(said))
    counts = {route: after.get(prefix + route, 0) - before.get(prefix + route, 0) for route in document["paths"]}
    shown = ", ".join(f"{route} {count}" for route, count in counts.items())
    report.add(f"{what}: answered 200: {shown}", min(counts.values()) > 0, "an operation refused every example")


def _answered(server: Server) -> dict[str, int]:
    """Gives how many answers of 200 each route has given."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r'headrace_http_responses_total\{route="([^"]+)",status="200"\} (\d+)', text)
    return {route: int(count) for route, count in found}


def _failures(said: str) -> str:
    """Gives what was found: the part between its heading and the warnings."""
    return said.partition("= FAILURES =")[2].partition("= WARNINGS =")[0].strip(" =\n")[:2000] or said[-600:]
