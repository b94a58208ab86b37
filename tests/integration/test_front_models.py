"""One front before three models, of which each has its own worker, limits and fate."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.protocol.launch import FrontLaunch, Kind, ModelLaunch
from headrace.replica.port import Readiness
from headrace.server.front import Front
from headrace.testing.mock_worker import Fault, MockWorker, Reply, Script

from .conftest import ByteKit

CHAT = {"messages": [{"role": "user", "content": "Say hi"}]}
CHAT_PATH = "/v1/chat/completions"
KINDS = {"org/talk": Kind.GENERATE, "vectors": Kind.EMBED, "org/more": Kind.GENERATE}


@dataclass
class Street:
    """A running front and its workers, by model."""

    front: Front
    workers: dict[str, MockWorker]
    client: aiohttp.ClientSession
    url: str

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.client.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if text.startswith("{") else text


@asynccontextmanager
async def street(
    folder: Path, scripts: dict[str, Script], limits: dict[str, dict[str, Any]] | None = None
) -> AsyncIterator[Street]:
    """Starts workers and a front; what has no script loads for ever."""
    async with AsyncExitStack() as stack:
        models, workers = [], {}
        for index, (name, kind) in enumerate(KINDS.items()):
            path = folder / f"{index}.sock"
            script = scripts.get(name, Script(loading_s=None, vector_width=4 * (kind is Kind.EMBED)))
            workers[name] = await stack.enter_async_context(MockWorker(script))
            await workers[name].start(path)
            more = (limits or {}).get(name, {})
            models.append(ModelLaunch("", [name, f"alias-{index}"], str(path), kind, **more))
        listener = socket.create_server(("127.0.0.1", 0))
        front = Front(FrontLaunch(models, []), [ByteKit()] * len(models), [listener])
        await stack.enter_async_context(front.running())
        client = await stack.enter_async_context(aiohttp.ClientSession())
        found = Street(front, workers, client, f"http://127.0.0.1:{listener.getsockname()[1]}")
        await until(lambda: all(front.models.named(name).replica.readiness is Readiness.READY for name in scripts))
        yield found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0.002)


def all_ready(**replies: Reply) -> dict[str, Script]:
    """Gives a script for each model: the text of an answer says who gave it."""
    return {
        name: Script(default=replies.get(name.rpartition("/")[2], Reply(text=name)), vector_width=4 * (kind == "embed"))
        for name, kind in KINDS.items()
    }


async def test_a_request_goes_to_the_model_that_it_names(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready()) as found:
        answers = [
            await found.post(CHAT_PATH, {**CHAT, "model": name})
            for name in ("org/talk", "org/more", "alias-2", "alias-0")
        ]
        vectors = await found.post("/v1/embeddings", {"model": "vectors", "input": "ab", "encoding_format": "float"})

    texts = [body["choices"][0]["message"]["content"] for _, body in answers]
    assert texts == ["org/talk", "org/more", "org/more", "org/talk"]
    assert [body["model"] for _, body in answers] == ["org/talk", "org/more", "alias-2", "alias-0"]
    assert vectors[1]["data"][0]["embedding"] == [97.0, 98.0, 0.0, 0.0]


async def test_an_invocation_is_the_endpoint_whose_fields_it_has(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready()) as found:
        asked = {
            CHAT_PATH: {**CHAT, "model": "org/talk"},
            "/v1/completions": {"model": "org/more", "prompt": "a"},
            "/v1/embeddings": {"input": "ab", "encoding_format": "float"},
        }
        pairs = [(await found.post(path, body), await found.post("/invocations", body)) for path, body in asked.items()]
        empty = await found.post("/invocations", {"model": "org/talk"})
        gone = await found.post("/invocations", {**CHAT, "model": "gone"})
        load = await found.get("/load")

    for plain, invoked in pairs:
        assert plain[0] == invoked[0] == 200
        assert plain[1].keys() == invoked[1].keys()
        shown = "choices" if "choices" in plain[1] else "data"
        assert plain[1][shown] == invoked[1][shown]
    assert (empty[0], empty[1]["error"]["code"]) == (400, "missing_required")
    assert (gone[0], gone[1]["error"]["code"]) == (404, "model_not_found")
    assert load == (200, {"server_load": 0})


async def test_an_unknown_model_is_a_404_that_lists_the_known_ones(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready()) as found:
        bodies = {
            CHAT_PATH: CHAT,
            "/v1/completions": {"prompt": "a"},
            "/v1/embeddings": {"input": "a"},
            "/v1/rerank": {"query": "a", "documents": ["a"]},
            "/tokenize": {"prompt": "a"},
            "/v1/messages": {**CHAT, "max_tokens": 5},
            "/v1/messages/count_tokens": CHAT,
            CHAT_PATH + "/input_tokens": CHAT,
        }
        answers = [await found.post(path, {**body, "model": "gone"}) for path, body in bodies.items()]
        card = await found.get("/v1/models/gone")
        health = await found.get("/health?model=gone")

    for status, body in [*answers, card, health]:
        assert status == 404
        for name in KINDS:
            assert name in body["error"]["message"]


async def test_a_name_may_be_left_out_where_one_model_alone_can_be_meant(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready()) as found:
        vectors = await found.post("/v1/embeddings", {"input": "ab"})
        chat = await found.post(CHAT_PATH, CHAT)
        classes = await found.post("/v1/classify", {"input": "ab"})
        tokens = await found.post("/tokenize", {"prompt": "ab"})

    assert (vectors[0], vectors[1]["model"]) == (200, "vectors")
    assert (chat[0], chat[1]["error"]["code"], chat[1]["error"]["param"]) == (400, "missing_required", "model")
    assert "org/talk (generates text)" in chat[1]["error"]["message"]
    assert (classes[0], classes[1]["error"]["code"]) == (400, "model_not_supported")
    assert (tokens[0], tokens[1]["error"]["code"]) == (400, "missing_required")


async def test_a_model_of_another_kind_says_what_it_does(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready()) as found:
        chat = await found.post(CHAT_PATH, {**CHAT, "model": "vectors"})
        vectors = await found.post("/v1/embeddings", {"model": "org/talk", "input": "a"})

    assert (chat[0], chat[1]["error"]["code"]) == (400, "model_not_supported")
    assert (vectors[0], vectors[1]["error"]["code"]) == (400, "model_not_supported")


async def test_models_are_listed_with_kind_and_state(tmp_path: Path) -> None:
    scripts = all_ready()
    del scripts["org/more"]
    async with street(tmp_path, scripts) as found:
        await until(lambda: found.front.models.named("org/more").replica.status is not None)
        _, body = await found.get("/v1/models")

    cards = {card["id"]: (card["root"], card["kind"], card["state"]) for card in body["data"]}
    assert cards == {
        "org/talk": ("org/talk", "generate", "ready"),
        "alias-0": ("org/talk", "generate", "ready"),
        "vectors": ("vectors", "embed", "ready"),
        "alias-1": ("vectors", "embed", "ready"),
        "org/more": ("org/more", "generate", "loading"),
        "alias-2": ("org/more", "generate", "loading"),
    }


async def test_a_model_that_loads_blocks_no_other(tmp_path: Path) -> None:
    scripts = all_ready()
    del scripts["org/more"]
    async with street(tmp_path, scripts) as found:
        await until(lambda: found.front.models.named("org/more").replica.status is not None)
        talk = await found.post(CHAT_PATH, {**CHAT, "model": "org/talk"})
        more = await found.post(CHAT_PATH, {**CHAT, "model": "org/more"})
        before = [(await found.get(path))[0] for path in ("/health", "/startupz", "/health?model=vectors")]
        _, startup = await found.get("/startupz")
        found.workers["org/more"].finish_loading()
        await found.front.models.named("org/more").replica.wait_ready()
        after = [(await found.get(path))[0] for path in ("/health", "/startupz", "/readyz")]

    assert talk[0] == 200
    assert (more[0], more[1]["error"]["code"]) == (503, "model_loading")
    assert before == [503, 503, 200]
    assert startup["progress_ratio"] == pytest.approx(2 / 3)
    assert after == [200, 200, 200]


async def test_a_worker_that_dies_takes_its_own_model_only(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready(talk=Reply(fault=Fault.CRASH, fault_at_token=3))) as found:
        running = asyncio.create_task(found.post(CHAT_PATH, {**CHAT, "model": "org/talk"}))
        status, body = await running
        others = await found.post(CHAT_PATH, {**CHAT, "model": "org/more"})
        health, states = await found.get("/health")
        own, _ = await found.get("/health?model=org/talk")
        _, metrics = await found.get("/metrics")

    assert (status, body["error"]["code"]) == (500, "worker_lost")
    assert others[0] == 200
    assert (health, states["models"]["org/talk"], states["models"]["vectors"]) == (200, "disconnected", "ready")
    assert own == 503
    assert 'headrace_worker_lost_total{model="org/talk"} 1' in metrics
    assert 'headrace_worker_lost_total{model="vectors"} 0' in metrics
    assert 'headrace_worker_ready{model="vectors"} 1' in metrics
    assert 'headrace_requests_total{model="org/more",endpoint="chat",outcome="ok"} 1' in metrics
    assert 'vllm:num_requests_running{model_name="org/more"} 0' in metrics


async def test_each_model_has_its_own_places(tmp_path: Path) -> None:
    held = all_ready(talk=Reply(hold_at_token=0))
    limits = {"org/talk": {"max_concurrent_requests": 1, "max_queued_requests": 0}}
    async with street(tmp_path, held, limits) as found:
        first = asyncio.create_task(found.post(CHAT_PATH, {**CHAT, "model": "org/talk"}))
        await until(lambda: found.workers["org/talk"].num_running == 1)
        full = await found.post(CHAT_PATH, {**CHAT, "model": "org/talk"})
        other = await found.post(CHAT_PATH, {**CHAT, "model": "org/more"})
        found.workers["org/talk"].release()
        last = await first

    assert (full[0], full[1]["error"]["code"]) == (503, "queue_full")
    assert other[0] == last[0] == 200


async def test_the_drain_waits_for_every_model(tmp_path: Path) -> None:
    async with street(tmp_path, all_ready(talk=Reply(hold_at_token=0), vectors=Reply(hold_at_token=1))) as found:
        chat = asyncio.create_task(found.post(CHAT_PATH, {**CHAT, "model": "org/talk"}))
        batch = asyncio.create_task(found.post("/v1/embeddings", {"input": ["a", "b"]}))
        await until(lambda: sum(worker.num_running for worker in found.workers.values()) == 2)
        drain = asyncio.create_task(found.front.drain(asyncio.Event()))
        await until(lambda: found.front.models.is_draining)
        num_open = found.front.models.num_open
        for worker in found.workers.values():
            worker.release()
        answers = [await chat, await batch]
        was_cut = await drain

    assert num_open == 2
    assert [status for status, _ in answers] == [200, 200]
    assert was_cut is False
