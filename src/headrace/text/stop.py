"""Finds stop strings in a text that arrives in pieces, and never lets a part of one out.

The stop that is complete first wins; of two that end at the same character, the longer one. This depends on the text
alone and not on how it was split, so a streamed answer equals one that was not. Text is compared code point by code
point; nothing is normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.base.errors import RequestError

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256


def check_stops(stops: Sequence[str], *, param: str = "stop") -> None:
    """Refuses stop strings that cannot be matched.

    Raises:
        RequestError: more than ``MAX_STOPS``, an empty one, or one over ``MAX_STOP_CHARS``.
    """
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{param} has {len(stops)} strings, the limit is {MAX_STOPS}", param=param)
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"{param} holds a string of {len(stop)} characters, allowed are 1 to {MAX_STOP_CHARS}", param=param
            )


class _Node:
    """One prefix of the stop strings (an Aho-Corasick automaton).

    ``fallback`` is the longest proper suffix of this prefix that is itself a prefix; ``match_chars`` the length of the
    longest stop string that ends here, 0 for none.
    """

    __slots__ = ("depth", "fallback", "match_chars", "next")

    def __init__(self, depth: int, fallback: _Node | None) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.fallback = fallback
        self.match_chars = 0


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0, None)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1, root))
        node.match_chars = len(stop)
    queue = list(root.next.values())
    for node in queue:  # breadth first: a node's fallback is shallower and thus finished
        for char, child in node.next.items():
            child.fallback = _step(node.fallback or root, char, root)
            child.match_chars = child.match_chars or child.fallback.match_chars
            queue.append(child)
    return root


def _step(node: _Node, char: str, root: _Node) -> _Node:
    here: _Node | None = node
    while here is not None:
        found = here.next.get(char)
        if found is not None:
            return found
        here = here.fallback
    return root


class StopMatcher:
    """Watches one answer for its stop strings.

    Args:
        stops: checked by ``check_stops``; may be empty.

    Cost: amortised O(1) a character; nothing where there are no stops. Holds less text than the longest stop.
    """

    __slots__ = ("_held", "_is_stopped", "_node", "_root", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "check_stops comes first"
        self._root = _build(stops) if stops else None
        self._node = self._root
        self._held = ""
        self._is_stopped = False
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Takes further text. Gives what may be shown now, and whether a stop string has been found.

        After a stop has been found everything further is swallowed.
        """
        if self._root is None or self._node is None:
            return text, False
        if self._is_stopped:
            return "", True
        buffer = self._held + text
        node = self._node
        for end in range(len(self._held), len(buffer)):
            node = _step(node, buffer[end], self._root)
            if node.match_chars:
                start = end + 1 - node.match_chars
                self.matched = buffer[start : end + 1]
                self._is_stopped, self._held = True, ""
                return buffer[:start], True
        # The node is the longest end of the text that may still become a stop string.
        cut = len(buffer) - node.depth
        self._node, self._held = node, buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """Ends the text without a stop: gives what was held back."""
        held, self._held, self._node = self._held, "", self._root
        return held
