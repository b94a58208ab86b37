"""What the process that tries grammars answers, and how its messages are framed: all that its parent knows of it."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from headrace.protocol.frames import Grammar

HEADER: Final = struct.Struct(">I")
"""The length before each message."""


class Verdict(msgspec.Struct, frozen=True):
    """What was found: the grammar as it is to be used, or an error's message."""

    grammar: Grammar | None = None
    error: str | None = None
