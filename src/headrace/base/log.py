"""Log set-up: one event per line, to stderr, as JSON for machines or as coloured text for people.

Event names and what they mean stand in ``base.catalogue.EVENTS``; keys carry their unit. stdout belongs to data.
"""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO, cast

from headrace.base.errors import ConfigError

# structlog's console renderer imports rich where it finds it: 0.18 s of CPU in every process that logs, for tracebacks
# in colour. Hidden meanwhile, unless somebody has imported it already.
if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # None is how an import is made to fail
    import structlog

    del sys.modules["rich"]
else:
    import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

# Keys whose values never reach a log, whatever a caller passes: credentials, and what users wrote.
_SECRET_KEYS: Final = frozenset(
    {"api_key", "authorization", "password", "token", "secret", "prompt", "messages", "text"}
)


def _hide_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key in _SECRET_KEYS & event.keys():
        event[key] = "[hidden]"
    return event


class _Stderr:
    """The stderr of the moment, so that a redirected stream is honoured."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
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
    renderer: Processor = (
        structlog.processors.JSONRenderer() if is_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _hide_secrets,
            structlog.processors.format_exc_info,
            renderer,
        ]
        if is_json
        else [
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False, key="timestamp"),
            _hide_secrets,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Stderr())),
        cache_logger_on_first_use=False,
    )


def get_log(name: str) -> FilteringBoundLogger:
    """Gives the logger of a module (pass ``__name__``); it follows a later ``setup_log``."""
    if not structlog.is_configured():
        setup_log("info")
    return cast("FilteringBoundLogger", structlog.get_logger(source=name))
