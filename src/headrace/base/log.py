"""Log set-up: one event per line, to stderr, as JSON for machines or as coloured text for people.

Event names and what they mean stand in ``base.catalogue.EVENTS``; keys carry their unit. stdout belongs to data. Our
own and not structlog, whose import took every process 80 ms of CPU and brought asyncio into the worker.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import UTC, datetime
from typing import Final

from headrace.base.errors import ConfigError

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}

# Keys whose values never reach a log, whatever a caller passes: credentials, and what users wrote.
_SECRET_KEYS: Final = frozenset(
    {"api_key", "authorization", "password", "token", "secret", "prompt", "messages", "text"}
)
_COLOURS: Final = {"debug": "\x1b[32m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
_EVENT_CHARS: Final = 30


class _Output:
    """Where lines of this process go, and which: set once, followed by every logger."""

    least: int = LEVELS["info"]
    is_json: bool = True


class Log:
    """A module's logger."""

    __slots__ = ("_source",)

    def __init__(self, source: str) -> None:
        self._source = source

    def debug(self, event: str, **keys: object) -> None:
        """Says what only a developer of this program wants to know."""
        self._write("debug", event, keys)

    def info(self, event: str, **keys: object) -> None:
        """Says where something is in its life."""
        self._write("info", event, keys)

    def warning(self, event: str, **keys: object) -> None:
        """Says that something is degraded, and handled."""
        self._write("warning", event, keys)

    def error(self, event: str, **keys: object) -> None:
        """Says that a person should act."""
        self._write("error", event, keys)

    def exception(self, event: str, **keys: object) -> None:
        """Says ``error`` with the traceback of the exception that is being handled."""
        self._write("error", event, {**keys, "exception": traceback.format_exc().rstrip()})

    def _write(self, level: str, event: str, keys: dict[str, object]) -> None:
        if LEVELS[level] < _Output.least:
            return
        for key in _SECRET_KEYS & keys.keys():
            keys[key] = "[hidden]"
        make = _json_line if _Output.is_json else _text_line
        # One write a line, to the stderr of the moment: lines of threads do not mix, a redirected stream is honoured.
        sys.stderr.write(make(self._source, level, event, keys) + "\n")
        sys.stderr.flush()


def setup_log(level: str, *, is_json: bool = True) -> None:
    """Sets the process's log up; call once at start, before anything is logged.

    Args:
        level: ``debug``, ``info``, ``warning`` or ``error``.
        is_json: JSON lines; else text for a terminal.

    Raises:
        ConfigError: ``level`` is none of the four.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown: use one of {', '.join(LEVELS)}")
    _Output.least = LEVELS[level]
    _Output.is_json = is_json


def get_log(name: str) -> Log:
    """Gives the logger of a module (pass ``__name__``); it follows a later ``setup_log``."""
    return Log(name)


def _json_line(source: str, level: str, event: str, keys: dict[str, object]) -> str:
    moment = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    line = {"source": source, **keys, "event": event, "level": level, "at": moment}
    return json.dumps(line, default=repr)


def _text_line(source: str, level: str, event: str, keys: dict[str, object]) -> str:
    trace = keys.pop("exception", None)
    is_coloured = sys.stderr.isatty()
    words = [
        time.strftime("%H:%M:%S"),
        _paint(f"[{level:<7}]", _COLOURS[level], is_coloured),
        _paint(f"{event:<{_EVENT_CHARS}}", _BOLD, is_coloured),
    ]
    # What others wrote must not move a terminal's cursor: everything but plain words is quoted and escaped.
    for key, value in (*keys.items(), ("source", source)):
        text = value if isinstance(value, str) and value.isprintable() and " " not in value else repr(value)
        words.append(f"{_paint(key, _DIM, is_coloured)}={text}")
    return " ".join(words) + ("" if trace is None else f"\n{trace}")


def _paint(text: str, colour: str, is_coloured: bool) -> str:
    return f"{colour}{text}{_PLAIN}" if is_coloured else text
