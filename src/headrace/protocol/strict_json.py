"""Reading a request body as JSON, strictly: what parsers silently repair or mangle is refused here.

Refused: invalid UTF-8, NaN and Infinity, duplicate keys, lone surrogates, integers over 64 bits, floats that overflow,
nesting deeper than ``MAX_DEPTH``, more than ``MAX_KEYS`` keys. What the fields mean is not this module's business.
"""

from __future__ import annotations

import json
import re
from typing import Final, NoReturn

from headrace.base.errors import RequestError

MAX_DEPTH: Final = 64
MAX_KEYS: Final = 10_000
# Far over what any request needs (4,096 messages of parts, the token ids of the longest contexts), and few enough that
# neither the parser nor the collector holds the interpreter for long.
MAX_CONTAINERS: Final = 50_000
MAX_VALUES: Final = 500_000
# Unescaped quotes, two for each string: what makes counting outside of strings slow.
_MAX_QUOTES: Final = 4 * 100_000
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_DEPTH_SCAN_BYTES: Final = 100_000
_INT_LOW: Final = -(2**63)
_INT_HIGH: Final = 2**64 - 1


def decode_object(body: bytes) -> dict[str, object]:
    """Gives the JSON object that ``body`` holds.

    Raises:
        RequestError: with ``invalid_json``, ``invalid_utf8`` or ``json_too_deep``.
    Cost: about 15 µs for an ordinary chat of 1 kB; run bodies over 64 KiB off the event loop.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8 at byte {error.start}: send JSON encoded as UTF-8", code="invalid_utf8"
        ) from None
    if text.startswith("\ufeff"):
        raise RequestError("the body begins with a byte order mark: leave it out", code="invalid_json")
    _check_size(body)
    num_keys = 0

    def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal num_keys
        built = dict(pairs)
        num_keys += len(pairs)
        if num_keys > MAX_KEYS:
            raise RequestError(f"the body has more than {MAX_KEYS} keys, the limit", code="invalid_json")
        if len(built) != len(pairs):
            raise RequestError(f"the key {_first_twice(pairs)} stands twice in one object", code="invalid_json")
        return built

    try:
        value = json.loads(text, object_pairs_hook=build, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep() from None
    except RequestError:
        raise
    except ValueError as error:  # JSONDecodeError, or an integer with more digits than int() converts
        where = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        what = error.msg if isinstance(error, json.JSONDecodeError) else "a number is out of range"
        raise RequestError(f"the body is not valid JSON{where}: {what}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be one JSON object", code="invalid_json")
    _check(value, may_hold_surrogates="\\u" in text)
    return value


def _check_size(body: bytes) -> None:
    """Refuses a flood of values before any is built. Cost: a few passes at memory speed; 50 ms at the very worst."""
    if _counts_fit(body):
        return
    if body.count(b'"') - body.count(b'\\"') > _MAX_QUOTES:
        raise RequestError("the body has too many strings", code="invalid_json")
    bare = _STRING.sub(b"", body)
    if _counts_fit(bare):
        return
    depth = 0
    for byte in bare[:_DEPTH_SCAN_BYTES]:
        if byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif byte in b"]}":
            depth -= 1
    raise RequestError(
        f"the body has too many values: the limits are {MAX_KEYS} keys, {MAX_CONTAINERS} lists and objects and "
        f"{MAX_VALUES} values",
        code="invalid_json",
    )


def _counts_fit(text: bytes) -> bool:
    return (
        text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS
        and text.count(b":") <= MAX_KEYS
        and text.count(b",") <= MAX_VALUES
    )


def _check(root: dict[str, object], *, may_hold_surrogates: bool) -> None:
    """Walks every value once, level by level."""
    level: list[object] = [root]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for container in level:
            if isinstance(container, dict):
                if may_hold_surrogates:
                    for key in container:
                        _check_text(key)
                items = list(container.values())
            else:
                assert isinstance(container, list)
                items = container
            kinds = set(map(type, items))
            if int in kinds:
                numbers = [item for item in items if type(item) is int]
                if min(numbers) < _INT_LOW or max(numbers) > _INT_HIGH:
                    raise RequestError("an integer does not fit in 64 bits", code="invalid_json")
            if float in kinds and any(type(item) is float and item - item != 0.0 for item in items):
                raise RequestError("a number is too large for a double", code="invalid_json")
            if may_hold_surrogates and str in kinds:
                for item in items:
                    if type(item) is str:
                        _check_text(item)
            if dict in kinds or list in kinds:
                below.extend(item for item in items if type(item) is dict or type(item) is list)
        if not below:
            return
        level = below
    raise _too_deep()


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            "a string holds half of a surrogate pair, which no UTF-8 text can hold", code="invalid_utf8"
        ) from None


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is not JSON: send a finite number", code="invalid_json")


def _too_deep() -> RequestError:
    return RequestError(f"the body is nested deeper than {MAX_DEPTH} levels, the limit", code="json_too_deep")


def _first_twice(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return shown(key)
        seen.add(key)
    raise AssertionError("no key stands twice")


def shown(value: object) -> str:
    """Gives a client's value as an error message may show it: escaped, at most 40 characters."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)}"
    text = ascii(value[:40]) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:36] + " ..."
