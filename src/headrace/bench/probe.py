"""Asks a server which model it serves, before a run."""

from __future__ import annotations

import http.client
from typing import Final

import msgspec

from headrace.base.errors import ConfigError
from headrace.bench.connection import parse_target

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 4 * 2**20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def find_model(url: str, headers: dict[str, str]) -> str:
    """Gives the first model of ``/v1/models``.

    Raises:
        ConfigError: nothing answers, it refuses, or it lists no model; the message says what to do.
    """
    target = parse_target(url)
    kind = http.client.HTTPSConnection if target.is_tls else http.client.HTTPConnection
    connection = kind(target.host, target.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"{target.prefix}/v1/models", headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"--server-url {url}: nothing answers there: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        said = " ".join(body[:200].decode("utf-8", "replace").split())
        raise ConfigError(
            f"--server-url {url}: /v1/models says {answer.status}: {said}", hint="give --model, or a key with --key-env"
        )
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--server-url {url}: /v1/models is not OpenAI's list: {error}; give --model") from error
    if not models:
        raise ConfigError(f"--server-url {url} lists no model; give --model")
    return models[0].id
