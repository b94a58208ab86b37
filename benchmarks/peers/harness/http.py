"""An engine behind its own HTTP server, asked as an OpenAI client would.

Nothing is streamed, so the client takes next to no CPU from the engine.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

from harness.cells import Cell, Kind
from harness.contender import ENCODE_S, MEASURE_LIMIT_S, START_LIMIT_S, Grouped, restart
from harness.processes import CellError, Group, wait_until

FIRST_ID, LAST_ID = 100, 49_000
ENCODER_FIRST_ID, ENCODER_LAST_ID = 1_000, 30_000


class Served(Grouped):
    """A server: ours, llama.cpp's, vLLM's.

    Args:
        command: given a free port, the command line.
        extra: fields that the server wants in every request, to ignore end tokens and cached prefixes.
    """

    def __init__(
        self,
        engine: str,
        form: str,
        command: Callable[[int], list[str | Path]],
        path: Path,
        log: Path,
        variables: Mapping[str, str],
        *,
        extra: Mapping[str, Any],
        is_encoder: bool = False,
        can_pause: bool = True,
    ) -> None:
        super().__init__(engine, form, path)
        self._command, self._log, self._variables = command, log, variables
        self._extra, self._is_encoder, self._can_pause = extra, is_encoder, can_pause
        self._port = 0
        self._model = ""

    def start(self) -> float:
        self._port = free_port()
        started_at_s = monotonic()
        command = self._command(self._port)
        self._group = Group(command, log=self._log, variables=self._variables, can_pause=self._can_pause)
        while True:
            wait_until(started_at_s + START_LIMIT_S, f"{self.engine}'s server", self._group)
            try:
                self._model = self._model or self._served_name()
                self._ask(1, 4, 1)
            except (OSError, http.client.HTTPException, _NotReadyError):
                continue
            return monotonic() - started_at_s

    def can(self, cell: Cell) -> bool:
        encodes = cell.kind in (Kind.CLIENTS, Kind.MEMORY) if self._is_encoder else cell.kind is not Kind.CLIENTS
        return encodes and (cell.kind is not Kind.ENCODE)

    def measure(self, cell: Cell) -> float:
        match cell.kind:
            case Kind.DECODE:
                return self._decode(cell)
            case Kind.PREFILL:
                return cell.prompt_tokens / self._ask(1, cell.prompt_tokens, 1)
            case Kind.BATCH:
                tokens = cell.sequences * cell.output_tokens
                return tokens / self._ask(cell.sequences, cell.prompt_tokens, cell.output_tokens)
            case Kind.START:
                return restart(self)
            case Kind.MEMORY:
                return self.peak_bytes() / 2**20
            case Kind.CLIENTS:
                return self._clients(cell)
            case Kind.ENCODE:
                raise CellError("measured in its process")

    def _decode(self, cell: Cell) -> float:
        """One prompt three times: to have it cached, then with one token, then with as many more as are counted.

        The last two hold the same prompt, the same HTTP and the same first token. A stream would not tell: text that
        is no whole character yet is held back, and with random weights that is most of it.
        """
        fields = json.loads(self._body(cell.prompt_tokens, 1))
        times = []
        for tokens in (1, 1, 1 + cell.output_tokens):
            body = json.dumps(fields | {"max_tokens": tokens}).encode()
            started_at_s = monotonic()
            self._send(body, tokens)
            times.append(monotonic() - started_at_s)
        return cell.output_tokens / (times[2] - times[1])

    def _clients(self, cell: Cell) -> float:
        num_done = 0
        started_at_s = monotonic()
        while monotonic() - started_at_s < 2 * ENCODE_S or num_done < 2 * cell.sequences:
            self._ask(4 * cell.sequences, cell.prompt_tokens, 1, clients=cell.sequences)
            num_done += 4 * cell.sequences
        return num_done / (monotonic() - started_at_s)

    def _ask(self, requests: int, prompt_tokens: int, output_tokens: int, clients: int | None = None) -> float:
        """Sends requests with fresh prompts, by so many clients at once; returns the seconds until all are answered."""
        bodies = [self._body(prompt_tokens, output_tokens) for _ in range(requests)]
        if requests == 1:
            started_at_s = monotonic()
            self._send(bodies[0], output_tokens)
            return monotonic() - started_at_s
        with ThreadPoolExecutor(clients or requests) as pool:
            started_at_s = monotonic()
            for done in [pool.submit(self._send, body, output_tokens) for body in bodies]:
                done.result()
            return monotonic() - started_at_s

    def _body(self, prompt_tokens: int, output_tokens: int) -> bytes:
        if self._is_encoder:
            ids = [random.randrange(ENCODER_FIRST_ID, ENCODER_LAST_ID) for _ in range(prompt_tokens)]
            return json.dumps({"model": self._model, "input": ids, "encoding_format": "base64"}).encode()
        ids = [random.randrange(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]
        fields = {"model": self._model, "prompt": ids, "max_tokens": output_tokens, "temperature": 0, **self._extra}
        return json.dumps(fields).encode()

    def _send(self, body: bytes, output_tokens: int) -> None:
        answer = self._post("/v1/embeddings" if self._is_encoder else "/v1/completions", body)
        if not self._is_encoder and answer["usage"]["completion_tokens"] != output_tokens:
            raise CellError(f"asked for {output_tokens} tokens: {answer['usage']}")

    def _served_name(self) -> str:
        return str(self._exchange("GET", "/v1/models", None)["data"][0]["id"])

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        return self._exchange("POST", path, body)

    def _exchange(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=MEASURE_LIMIT_S)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status in (404, 503):  # its server is there before its model
            raise _NotReadyError
        if response.status != 200:
            raise CellError(f"status {response.status}: {text[:300].decode(errors='replace')}")
        found: dict[str, Any] = json.loads(text)
        return found

    def answer(self, method: str, **fields: Any) -> dict[str, Any]:
        """Vectors of given token ids; nothing else is asked of a server."""
        assert method == "vectors"
        body = {"model": self._model, "input": fields["ids"], "encoding_format": "base64"}
        items = self._post("/v1/embeddings", json.dumps(body).encode())["data"]
        return {"vectors": [base64.b64decode(item["embedding"]) for item in items]}


class _NotReadyError(Exception):
    """The server answers, and its model is not loaded."""


def free_port() -> int:
    """Returns a loopback port that nobody listens on at the moment."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
