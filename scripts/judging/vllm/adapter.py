"""Lets vLLM's entrypoint tests run without vLLM: a pytest plugin.

``tests.utils`` becomes a module whose servers know only a base URL; whatever is imported from ``vllm`` is an empty
stand-in, so tests of vLLM's own classes fail and are listed as such, while those that talk HTTP run as they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import sys
import types
from typing import ClassVar
from unittest.mock import MagicMock

import pytest

URL = os.environ["JUDGE_URL"]


# Flags of vLLM's server that are fields of a request here.
_FIELDS_OF_FLAGS = {"--return-tokens-as-token-ids": ("return_tokens_as_token_ids", True)}


def _client_with(fields: dict[str, object]):  # type: ignore[no-untyped-def]  # httpx is the judge's
    """Gives an HTTP client that adds fields to every body."""
    import httpx

    class Adding(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            body = json.dumps(json.loads(await request.aread()) | fields).encode()
            headers = {name: value for name, value in request.headers.items() if name != "content-length"}
            return await super().handle_async_request(
                httpx.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)
            )

    return httpx.AsyncClient(transport=Adding(), timeout=100)


class RemoteOpenAIServer:
    """The running server, under the name and with the methods that the tests know."""

    DUMMY_API_KEY = "none"

    def __init__(self, model: str, args: list[str] | None = None, **_: object) -> None:
        self.model = model
        self.fields = {field: value for flag, (field, value) in _FIELDS_OF_FLAGS.items() if flag in (args or [])}
        self.url_root = URL
        self.host, self.port = URL.removeprefix("http://").split(":")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *(part.strip("/") for part in parts if part)))

    def get_client(self, **options: object):  # type: ignore[no-untyped-def]  # openai is the judge's
        import openai

        return openai.OpenAI(**{"base_url": URL + "/v1", "api_key": "none", "max_retries": 0, "timeout": 100} | options)

    def get_async_client(self, **options: object):  # type: ignore[no-untyped-def]  # as above
        import openai

        common = {"base_url": URL + "/v1", "api_key": "none", "max_retries": 0, "timeout": 100}
        if self.fields:
            common["http_client"] = _client_with(self.fields)
        return openai.AsyncOpenAI(**common | options)

    def get_async_client_anthropic(self, **options: object):  # type: ignore[no-untyped-def]  # as above
        import anthropic

        return anthropic.AsyncAnthropic(**{"base_url": URL, "api_key": "none", "max_retries": 0} | options)


class _Loose(types.SimpleNamespace):
    """An answer as an object, whatever its fields are."""

    @classmethod
    def model_validate(cls, value: object) -> object:
        if isinstance(value, dict):
            return cls(**{name: cls.model_validate(item) for name, item in value.items()})
        return [cls.model_validate(item) for item in value] if isinstance(value, list) else value


class _StandIn(types.ModuleType):
    """A module that has every name; exceptions and types are classes of their own, the rest are mocks."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        made: object = MagicMock(name=name)
        if name.endswith(("Error", "Exception")):
            made = type(name, (Exception,), {})
        elif name.endswith("Response"):
            made = _Loose
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``vllm`` and what tests import for machines that they are not on."""

    names = (
        "vllm",
        "tests.conftest",
        "tests.models",
        "schemathesis",
        "sentence_transformers",
        "torchvision",
        "PIL",
    )

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if any(name == own or name.startswith(own + ".") for own in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _tokenizer(*_: object, **__: object) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["JUDGE_TOKENIZER"])


sys.meta_path.insert(0, _Finder())
_utils = _StandIn("tests.utils")
_utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]  # a stand-in has every name
_utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
_utils.VLLM_PATH = MagicMock()  # type: ignore[attr-defined]
sys.modules["tests.utils"] = _utils
import vllm.tokenizers  # noqa: E402  # type: ignore[import-not-found]  # the stand-in

vllm.tokenizers.get_tokenizer = _tokenizer
import vllm.config  # noqa: E402  # type: ignore[import-not-found]  # the stand-in

vllm.config.ModelConfig = lambda **_: types.SimpleNamespace(get_vocab_size=lambda: len(_tokenizer()))


# Tokenizers of other models are replaced by the served one's: what is compared is our count with the tokenizer's own.
def pytest_configure(config: pytest.Config) -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained = _of_the_server(transformers.AutoTokenizer.from_pretrained)


def _of_the_server(load):  # type: ignore[no-untyped-def]  # transformers is the judge's
    def from_pretrained(*_: object, **__: object) -> object:
        return load(os.environ["JUDGE_TOKENIZER"])

    return from_pretrained


def _vllm_conftest() -> types.ModuleType:
    """The fixtures of tests/entrypoints/conftest.py, which need nothing of vLLM."""
    spec = importlib.util.spec_from_file_location("vllm_fixtures", "tests/entrypoints/conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for _name, _value in vars(_vllm_conftest()).items():
    if not _name.startswith("_") and _name not in globals():
        globals()[_name] = _value


class Cosines:
    """Scores pairs of texts by the server's own vectors: that these are right is held by tests/quality."""

    def __init__(self, model: str) -> None:
        self._model = model

    def predict(self, pairs: list[list[str]]) -> Cosines:
        import requests

        body = {"model": self._model, "input": [text for pair in pairs for text in pair], "encoding_format": "float"}
        data = requests.post(URL + "/v1/embeddings", json=body, timeout=100).json()["data"]
        vectors = [item["embedding"] for item in data]
        self._scores = [_cosine(*vectors[at : at + 2]) for at in range(0, len(vectors), 2)]
        return self

    def tolist(self) -> list[float]:
        return self._scores


def _cosine(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True)) / (math.hypot(*first) * math.hypot(*second))


_scoring = _StandIn("tests.entrypoints.pooling.scoring.util")
_scoring.EncoderScoringHfRunner = Cosines  # type: ignore[attr-defined]  # as above
sys.modules["tests.entrypoints.pooling.scoring.util"] = _scoring


# The fixtures of tests/tool_use/conftest.py, for the one server there is.
@pytest.fixture(scope="session")
def server_config() -> dict[str, object]:
    return {"model": "demo", "arguments": [], "supports_parallel": True}


@pytest.fixture(scope="session")
def server() -> RemoteOpenAIServer:
    return RemoteOpenAIServer("demo")


@pytest.fixture
async def client(server: RemoteOpenAIServer):  # type: ignore[no-untyped-def]  # an async generator of a judge's class
    async with server.get_async_client() as client:
        yield client


@pytest.fixture(scope="session")
def qwen3_lora_files() -> str:
    return "none"


@pytest.fixture(scope="module")
def zephyr_lora_files() -> str:
    return "none"
