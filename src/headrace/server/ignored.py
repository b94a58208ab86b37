"""Fields of requests that nobody knows: counted, logged once, and listed in a header of the answer."""

from __future__ import annotations

from typing import Final

from headrace.base.log import get_log
from headrace.base.recorder import Recorder

_MAX_LOGGED_SETS: Final = 256
_MAX_SHOWN: Final = 32
_MAX_SHOWN_CHARS: Final = 64

_log = get_log(__name__)


class IgnoredFields:
    """Those of one endpoint.

    Args:
        endpoint: its name for metrics and logs.
    """

    def __init__(self, endpoint: str, recorder: Recorder) -> None:
        self._endpoint = endpoint
        self._recorder = recorder
        self._logged: set[tuple[str, ...]] = set()

    def note(self, names: tuple[str, ...]) -> list[tuple[bytes, bytes]]:
        """Counts them, logs each set of names once, and gives the header that lists them; none for none."""
        if not names:
            return []
        self._recorder.count("headrace_ignored_fields_total", len(names), endpoint=self._endpoint)
        shown = [ascii(name)[1:-1][:_MAX_SHOWN_CHARS] for name in names[:_MAX_SHOWN]]
        if names not in self._logged and len(self._logged) < _MAX_LOGGED_SETS:
            self._logged.add(names)
            _log.info("request_fields_ignored", endpoint=self._endpoint, fields=shown)
        return [(b"x-headrace-ignored-fields", ",".join(name.replace(",", "") for name in shown).encode())]
