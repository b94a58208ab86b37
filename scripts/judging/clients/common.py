"""What the client scripts share: where the server is, and how a check is told (one JSON line each)."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable

URL = os.environ["JUDGE_URL"]
BASE = URL + "/v1"
MODEL = os.environ["JUDGE_MODEL"]
KEY = "none"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def check(task: Callable[[], object]) -> None:
    """Runs a task and says how it went."""
    try:
        task()
        said = {"check": task.__name__, "ok": True, "why": ""}
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        said = {"check": task.__name__, "ok": False, "why": f"{type(fault).__name__} {fault} at {where.lineno}"[:400]}
    print(json.dumps(said), flush=True)
