"""Names of things that cross package borders, and how new ones are made."""

from __future__ import annotations

import re
import secrets
from typing import Final, NewType

RequestId = NewType("RequestId", str)
ModelDigest = NewType("ModelDigest", str)
Sha256 = NewType("Sha256", str)

MAX_ID_CHARS: Final = 128
_SANE = re.compile(r"^[A-Za-z0-9._:\-]{1,128}$")


def new_id(prefix: str) -> str:
    """Makes an unguessable id such as ``chatcmpl-3f…`` (96 random bits: a clash needs about 2^48 ids)."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_request_id() -> RequestId:
    """Makes the id of one HTTP request, as answered in ``x-request-id``."""
    return RequestId(new_id("req"))


def is_sane_id(text: str) -> bool:
    """Whether an id that a client sent may be taken over: 1 to 128 characters that no log or header minds."""
    return _SANE.match(text) is not None
