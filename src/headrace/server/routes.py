"""What may be said to somebody who asks for a route that is not there."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Final

from headrace.base.errors import NotFoundError

_SLASHES: Final = re.compile("/{2,}")
_MAX_SHOWN_CHARS: Final = 100


def no_route(method: str, path: str, known: Set[str]) -> NotFoundError:
    """Makes the error, with the route that was probably meant: one slash too many, or ``/v1`` twice, or forgotten."""
    shown = ascii(path[:_MAX_SHOWN_CHARS])[1:-1]
    plain = "/" + _SLASHES.sub("/", path).strip("/")
    bare = plain
    while bare.startswith("/v1/"):
        bare = bare.removeprefix("/v1")
    # What was asked for is not there itself, so a candidate is always another path.
    found = next((one for one in (plain, "/v1" + bare, bare) if one in known), None)
    hint = f": did you mean {found}?" if found is not None else ""
    return NotFoundError(f"there is no route {method} {shown} here{hint}", code="route_not_found")
