"""schemathesis on our own ``/openapi.json``: no server error, no answer that the document does not describe."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from judging.environment import FOLDER, python_with, version_of
from judging.findings import Report
from judging.servers import Server

PACKAGES = ("schemathesis==4.32.5",)
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"
# Generation is bounded by the schema alone: these keep an example to a few tokens' work.
PATHS = (
    "^/(v1/(chat/completions|completions|messages|messages/count_tokens|models)|tokenize|detokenize|tokenizer_info)$"
)
_TIMEOUT_S = 3600


def run(servers: Mapping[str, Server], max_examples: int) -> Report:
    """Runs it with so many examples for each operation."""
    server = servers["chat"]
    python = python_with("schemathesis", PACKAGES)
    report = Report("schemathesis", version_of(python, "schemathesis"))
    done = subprocess.run(
        [
            str(python.with_name("schemathesis")), "run", server.url + "/openapi.json", "--url", server.url,
            "--include-path-regex", PATHS, "--mode", "positive", "--phases", "examples,coverage,fuzzing",
            "--checks", CHECKS, "--max-examples", str(max_examples), "--seed", "1", "--continue-on-failure",
            "--request-timeout", "120",
        ],
        cwd=FOLDER, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    cases = re.search(r"(\d+) generated", said)
    name = f"{cases.group(1) if cases else '?'} cases of {max_examples} an operation"
    report.add(name, done.returncode == 0, _failures(said))
    return report


def _failures(said: str) -> str:
    """Gives what was found: the part between its heading and the warnings."""
    return said.partition("= FAILURES =")[2].partition("= WARNINGS =")[0].strip(" =\n")[:2000] or said[-600:]
