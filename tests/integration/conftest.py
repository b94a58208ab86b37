"""A whole front in this process: real sockets, the mock worker, and a vocabulary of bytes."""

from __future__ import annotations

import asyncio
import codecs
import io
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from headrace.base.clock import Clock
from headrace.base.errors import ContextLengthError
from headrace.gateway.pipeline import Pipeline
from headrace.protocol.launch import FrontLaunch, ModelLaunch
from headrace.replica.port import Readiness, Replica
from headrace.server.front import Front
from headrace.testing.mock_worker import MockWorker, Script
from headrace.text.message import Dialect
from headrace.text.stop import StopMatcher
from headrace.text.tool_format import GENERIC

PLAIN = Dialect(GENERIC, None)
MODEL = "tests/bytes"


class ByteTokenizer:
    """Every byte is a token; ids from 256 have no text."""

    def encode_within(self, text: str, *, add_special: bool, limit_tokens: int, param: str) -> list[int]:
        ids = list(text.encode())
        if len(ids) > limit_tokens:
            raise ContextLengthError(
                f"This model's maximum context length is {limit_tokens} tokens. However, your {param} has at least "
                f"{len(ids)} tokens",
                param=param,
            )
        return ids

    def token_bytes(self, index: int) -> bytes:
        return bytes([index]) if index < 256 else b""

    def token_text(self, index: int) -> str:
        return f"<{index:02x}>"


class ByteText:
    """Incremental UTF-8."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in ids if token < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PlainTemplate:
    """role: content, a line each."""

    takes_tools = False

    def form(self, *, has_tools: bool) -> PlainTemplate:
        return self

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return "\n".join([*lines, *(["assistant:"] if add_generation_prompt else [])])

    def split_kwargs(
        self, kwargs: Mapping[str, object], *, has_tools: bool = False
    ) -> tuple[dict[str, object], list[str]]:
        return {}, sorted(kwargs)


class ByteKit:
    """The text kit of the byte vocabulary."""

    tokenizer = ByteTokenizer()
    template = PlainTemplate()
    has_chat_template = True

    def __init__(self, dialect: Dialect = PLAIN) -> None:
        self.dialect = dialect
        self.special_tokens: dict[str, str] = {}

    def text_stream(self, *, is_text_start: bool, skip_special: bool = True, is_message: bool = False) -> ByteText:
        return ByteText()

    def stops(self, stops: Sequence[str]) -> StopMatcher:
        return StopMatcher(stops)


class House:
    """A running front with its worker, and a client."""

    def __init__(self, front: Front, worker: MockWorker, port: int, socket_path: Path, client: aiohttp.ClientSession):
        self.front = front
        self.worker = worker
        self.port = port
        self.socket_path = socket_path
        self.client = client

    @property
    def pipeline(self) -> Pipeline:
        """The model's pipeline in the front."""
        return next(iter(self.front.models))

    @property
    def replica(self) -> Replica:
        """The front's view of the worker."""
        return self.pipeline.replica

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Posts JSON; gives status, decoded body and headers."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        all_headers = {"content-type": "application/json", **headers}
        async with self.client.post(self.url(path), data=io.BytesIO(data), headers=all_headers) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw else None, response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
        async with self.client.get(self.url(path), headers=headers) as response:
            return response.status, await response.text(), response.headers

    async def stream(self, path: str, body: dict[str, object]) -> list[str]:
        """Posts with ``stream: true``; gives the payloads of all frames, comments as they are."""
        async with self.client.post(self.url(path), json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            text = (await response.read()).decode()
        frames = [frame for frame in text.split("\n\n") if frame]
        return [frame.removeprefix("data: ") for frame in frames]

    async def restart_worker(self, script: Script | None = None) -> None:
        """Starts another worker on the same path, as a supervisor does."""
        await self.worker.stop()
        self.socket_path.unlink(missing_ok=True)
        self.worker = MockWorker(script)
        await self.worker.start(self.socket_path)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Fronts run on uvloop, whose transports differ from asyncio's."""
    return {"uvloop": uvloop.new_event_loop}


MakeHouse = Callable[..., Any]


@pytest.fixture
async def make_house(tmp_path: Path) -> AsyncIterator[MakeHouse]:
    """Gives a function that starts a front over a mock worker: ``await make_house(script, limit=value, …)``."""
    async with AsyncExitStack() as stack:

        async def make(
            script: Script | None = None,
            *,
            is_ready: bool = True,
            clock: Clock | None = None,
            dialect: Dialect = PLAIN,
            **limits: Any,
        ) -> House:
            socket_path = tmp_path / "worker.sock"
            worker = MockWorker(script)
            await worker.start(socket_path)
            listener = socket.create_server(("127.0.0.1", 0))
            names = ("header_timeout_s", "body_idle_s", "max_connections")
            edges = {name: limits.pop(name) for name in names if name in limits}
            ours = {name: limits.pop(name) for name in FrontLaunch.__struct_fields__ if name in limits}
            model = ModelLaunch("", [MODEL, "bytes"], str(socket_path), **limits)
            launch = FrontLaunch([model], [], **ours)
            front = Front(launch, [ByteKit(dialect)], [listener], clock=clock, **edges)
            port = listener.getsockname()[1]
            await stack.enter_async_context(front.running())
            client = await stack.enter_async_context(aiohttp.ClientSession())
            house = House(front, worker, port, socket_path, client)
            stack.push_async_callback(lambda: house.worker.stop())
            if is_ready:
                await house.replica.wait_ready()
                assert house.replica.readiness is Readiness.READY
            return house

        yield make
