"""What the mock server does: a script in YAML or JSON, or flags; all of it optional.

ttft_ms: lognormal:80:0.3      # until the first token; also the whole time of embeddings and rerank
itl_ms: 10                     # between tokens
tokens: uniform:20:60          # of an answer; without it, as many as the request's max_tokens, else 16
errors: [{status: 429, ratio: 0.01}]
faults: [{kind: reset, at_token: 5, ratio: 0.02}]
stall: {every_s: 5, for_ms: 500}
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from headrace.base.errors import ConfigError
from headrace.bench.spread import Spread, parse_spread

FaultKind = Literal["crash", "hang", "reset", "close", "malformed", "no_done", "stream_error"]
DEFAULT_TEXT: Final = (
    "The water comes down the channel to the wheel , and the wheel turns the stone that makes the flour for the town ."
)


class ErrorRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A share of requests that is answered with an error.

    Args:
        ratio: of all requests, in [0, 1].
        retry_after_s: sent as ``retry-after`` where given.
    """

    status: int
    ratio: float = 1.0
    retry_after_s: float | None = None


class FaultRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A share of answers that goes wrong.

    Args:
        kind: ``crash`` ends the process; ``hang`` sends nothing more; ``reset`` and ``close`` end the connection, with
            and without RST; ``malformed`` sends a frame that is no JSON; ``no_done`` leaves out ``[DONE]``;
            ``stream_error`` sends an error inside the stream.
        at_token: before which token, from 0; an answer that is not streamed fails before its first byte.
        ratio: of all answers, in [0, 1].
    """

    kind: FaultKind
    at_token: int = 0
    ratio: float = 1.0


class Stall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole server stands still for ``for_ms`` every ``every_s``, counted from its start."""

    every_s: float
    for_ms: float

    def wall_at(self, start_s: float, work_s: float) -> float:
        """Gives when work of ``work_s`` is done that starts at ``start_s``, both since the server's start.

        Stall number k ≥ 1 covers [k × every_s, k × every_s + for_ms ÷ 1000); no work is done in it.
        """
        at_s, for_s = start_s, self.for_ms / 1e3
        while True:
            number = int(at_s / self.every_s)
            if number >= 1 and at_s < number * self.every_s + for_s:
                at_s = number * self.every_s + for_s
            free_s = (int(at_s / self.every_s) + 1) * self.every_s - at_s
            if work_s < free_s:
                return at_s + work_s
            work_s -= free_s
            at_s += free_s


class _Wire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's form."""

    models: tuple[str, ...] = ("mock",)
    ttft_ms: float | str = 20
    itl_ms: float | str = 5
    tokens: float | str | None = None
    text: str = DEFAULT_TEXT
    tokens_per_chunk: int = 1
    chunks_per_write: int = 1
    usage: Literal["asked", "always", "never"] = "asked"
    embedding_size: int = 384
    slots: int | None = None
    seed: int = 0
    leak_kib: float = 0
    errors: tuple[ErrorRule, ...] = ()
    faults: tuple[FaultRule, ...] = ()
    stall: Stall | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A script that was checked.

    Args:
        tokens: None answers with as many as are asked for.
        words: an answer is made of these, one per token, over and over.
        tokens_per_chunk: in one event; ``chunks_per_write`` such events go out together, when the last of them is due.
        slots: requests that are worked on at once, the others waiting in line; None takes all.
        leak_kib: memory that each request leaves behind.
    """

    models: tuple[str, ...]
    ttft_ms: Spread
    itl_ms: Spread
    tokens: Spread | None
    words: tuple[str, ...]
    tokens_per_chunk: int
    chunks_per_write: int
    usage: Literal["asked", "always", "never"]
    embedding_size: int
    slots: int | None
    seed: int
    leak_kib: float
    errors: tuple[ErrorRule, ...]
    faults: tuple[FaultRule, ...]
    stall: Stall | None


def read_script(path: Path | None, flags: dict[str, object]) -> Script:
    """Reads a script; flags that are not None win over the file.

    Raises:
        ConfigError: naming the file, the field, its value and what is allowed.
    """
    values: dict[str, object] = {}
    where = "the mock's flags"
    if path is not None:
        where = str(path)
        try:
            values = msgspec.yaml.decode(path.read_bytes(), type=dict[str, object])
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is no mock script: {error}") from error
    values |= {name: value for name, value in flags.items() if value is not None}
    try:
        return _check(msgspec.convert(values, _Wire), where)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_with_nearest(str(error))}") from error


def _with_nearest(message: str) -> str:
    match = re.search(r"unknown field `(\w+)`", message)
    known = {name for kind in (_Wire, ErrorRule, FaultRule, Stall) for name in kind.__struct_fields__}
    nearest = difflib.get_close_matches(match.group(1), known, 1) if match else []
    return f"{message}; did you mean {nearest[0]}?" if nearest else message


def _check(wire: _Wire, where: str) -> Script:
    words = tuple(wire.text.split())
    at_least: list[tuple[str, float, float]] = [
        ("models", len(wire.models), 1),
        ("text (in words)", len(words), 1),
        ("tokens_per_chunk", wire.tokens_per_chunk, 1),
        ("chunks_per_write", wire.chunks_per_write, 1),
        ("embedding_size", wire.embedding_size, 1),
        ("slots", 1 if wire.slots is None else wire.slots, 1),
        ("leak_kib", wire.leak_kib, 0),
    ]
    at_least += [("faults.at_token", fault.at_token, 0) for fault in wire.faults]
    for name, value, least in at_least:
        if value < least:
            raise ConfigError(f"{where}: {name} is {value:g}; it must be at least {least:g}")
    for error in wire.errors:
        if not 400 <= error.status <= 599:
            raise ConfigError(f"{where}: errors.status is {error.status}; it must be from 400 to 599")
    for kind, rules in (("errors", wire.errors), ("faults", wire.faults)):
        if any(not 0 <= rule.ratio <= 1 for rule in rules) or sum(rule.ratio for rule in rules) > 1 + 1e-9:
            raise ConfigError(f"{where}: the ratios of {kind} must be from 0 to 1, and at most 1 together")
    if wire.stall is not None and not 0 < wire.stall.for_ms / 1e3 < wire.stall.every_s:
        raise ConfigError(
            f"{where}: a stall of {wire.stall.for_ms:g} ms every {wire.stall.every_s:g} s leaves no time to work"
        )
    return Script(
        models=wire.models,
        ttft_ms=parse_spread(wire.ttft_ms, "ttft_ms"),
        itl_ms=parse_spread(wire.itl_ms, "itl_ms"),
        tokens=None if wire.tokens is None else parse_spread(wire.tokens, "tokens"),
        words=words,
        tokens_per_chunk=wire.tokens_per_chunk,
        chunks_per_write=wire.chunks_per_write,
        usage=wire.usage,
        embedding_size=wire.embedding_size,
        slots=wire.slots,
        seed=wire.seed,
        leak_kib=wire.leak_kib,
        errors=wire.errors,
        faults=wire.faults,
        stall=wire.stall,
    )
