"""What ``POST /invocations`` hands a body to: the endpoint whose fields it has."""

from __future__ import annotations

from typing import Final

INPUT: Final = "input"
"""Stands for vectors or for classes, as the model makes them."""
BY_FIELD: Final = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "query": "/v1/rerank",
    "queries": "/v1/score",
    "text_1": "/v1/score",
    "data_1": "/v1/score",
}
"""The first of these fields that a body has decides; with none of them it must have ``input``."""
