"""Schemas of real-world shapes on a real server: what is not cut validates, with a model that knows nothing."""

from __future__ import annotations

import asyncio
import json
import statistics
from typing import Any

import aiohttp
import jsonschema
import pytest

from headrace.testing.random_schemas import SchemaMaker, depth_of

NUM_SCHEMAS = 120


@pytest.mark.timeout(600)
async def test_every_answer_that_was_not_cut_validates(server: Any) -> None:
    schemas = [SchemaMaker(seed).make() for seed in range(NUM_SCHEMAS)]
    assert statistics.median(map(depth_of, schemas)) >= 3
    room = asyncio.Semaphore(8)
    cut = 0

    async with aiohttp.ClientSession() as session:

        async def one(seed: int, schema: dict[str, Any]) -> None:
            nonlocal cut
            body = {
                "model": server.model,
                "messages": [{"role": "user", "content": "Make one"}],
                "max_tokens": 700,
                "temperature": 1.3,
                "seed": seed,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            }
            async with room, session.post(f"{server.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert response.status == 200, (answer, schema)
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length":
                cut += 1
                return
            try:
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            except (jsonschema.ValidationError, ValueError) as fault:
                raise AssertionError(f"{fault}\n{choice}\n{json.dumps(schema)}") from fault

        await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas)))

    assert cut <= 0.1 * NUM_SCHEMAS, f"{cut} of {NUM_SCHEMAS} were cut by length"
    server.wait_idle()
