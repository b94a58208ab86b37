"""What the scripts of recorded outputs share: the recordings that the server plays, and how what a client read is told.

The server has a model for each recording, which says nothing else. A task reads one recording in one way and gives what
it found: its text, its thoughts and its calls, whichever of them the client can tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

HI = [{"role": "user", "content": "Hi"}]
ALL: list[dict[str, Any]] = json.loads(Path(os.environ["JUDGE_RECORDINGS"]).read_text())


def parsed(arguments: object) -> object:
    """Gives arguments as a value; None where a recording was cut within them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return None


def is_whole(recording: dict[str, Any]) -> bool:
    """Whether all its calls have arguments that can be read."""
    return all(isinstance(parsed(arguments), dict) for _, arguments in recording["calls"])


def reads(
    *, keeps: Callable[[dict[str, Any]], bool] = is_whole, is_exact: bool = False
) -> Callable[[Callable[[dict[str, Any]], dict[str, Any]]], None]:
    """Runs a task on every recording that ``keeps``, and says for each form how many were read right.

    Args:
        is_exact: arguments are compared as they are written, not as values.
    """

    def run(task: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        forms: dict[str, list[str]] = {}
        chosen = [recording for recording in ALL if keeps(recording)]
        for recording in chosen:
            wrong = forms.setdefault(recording["form"], [])
            wanted = {"text": recording["text"], "thought": recording["thought"]}
            calls = [tuple(call) for call in recording["calls"]]
            wanted["calls"] = calls if is_exact else [(name, parsed(arguments)) for name, arguments in calls]
            try:
                got = task(recording)
                if not is_exact and "calls" in got:
                    got["calls"] = [(name, parsed(arguments)) for name, arguments in got["calls"]]
                different = {key: value for key, value in got.items() if value != wanted[key]}
                if different:
                    wrong.append(
                        f"{recording['model']}: {different}, not { ({key: wanted[key] for key in different}) }"
                    )
            except Exception as fault:
                wrong.append(f"{recording['model']}: {type(fault).__name__} {fault}")
        for form, wrong in forms.items():
            count = sum(recording["form"] == form for recording in chosen)
            said = {"check": f"{task.__name__}: {count} of {form}", "ok": not wrong, "why": "; ".join(wrong)[:600]}
            print(json.dumps(said), flush=True)

    return run
