"""What big models really write when they call tools: recorded outputs, with the message that each one is.

They are data from the parser tests of other servers; each names its source. The mock worker plays them
(``recorded_script``), so that parsers, streams and clients are tried on them without any model.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from headrace.testing.mock_worker import Reply, Script
from headrace.text.message import Dialect
from headrace.text.reasoning import GEMMA_MARKS, MISTRAL_MARKS, THINK_MARKS
from headrace.text.tool_format import FUNCTION_GEMMA, GEMMA4, GENERIC, HERMES, LLAMA3, MISTRAL

_DIALECTS = {
    "hermes": Dialect(HERMES, THINK_MARKS),
    "llama3": Dialect(LLAMA3, None),
    "mistral": Dialect(MISTRAL, MISTRAL_MARKS),
    "gemma": Dialect(FUNCTION_GEMMA, None),
    "gemma4": Dialect(GEMMA4, GEMMA_MARKS),
    "generic": Dialect(GENERIC, THINK_MARKS),
}


class Recording(msgspec.Struct, frozen=True):
    """One output. ``calls`` are names and the JSON text of arguments."""

    form: str
    source: str
    written: str
    text: str
    calls: list[tuple[str, str]]
    thought: str

    @property
    def dialect(self) -> Dialect:
        """How the model that wrote it writes."""
        return _DIALECTS[self.form]

    @property
    def tools(self) -> list[dict[str, object]]:
        """The tools that it could have been given; where it calls none, one that nobody calls."""
        names = dict.fromkeys(name for name, _ in self.calls) or {"unused": None}
        return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


class _File(msgspec.Struct):
    about: str
    outputs: list[Recording]


@functools.cache
def recordings() -> tuple[Recording, ...]:
    """Gives all of them."""
    data = Path(__file__).with_name("data") / "recorded_outputs.json"
    return tuple(msgspec.json.decode(data.read_bytes(), type=_File).outputs)


def recorded_script(form: str) -> tuple[list[Recording], Script]:
    """Gives the recordings of one form, and a script of the mock worker that plays them in this order."""
    chosen = [recording for recording in recordings() if recording.form == form]
    return chosen, Script(replies=[Reply(text=recording.written) for recording in chosen])
