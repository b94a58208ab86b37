"""What vLLM's tests of vectors compare with, real where a stand-in would let everything pass: a pytest plugin.

The numbers that bytes are read as are torch's; that the vectors are right is held by tests/quality, so a reference
model is the server itself, asked in another way.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import judge_adapter  # type: ignore[import-not-found]  # noqa: F401  # makes the stand-ins
import pytest
import requests
import tests.models.language.pooling.embed_utils as embed_utils  # type: ignore[import-not-found]  # a stand-in
import tests.models.utils as compared  # type: ignore[import-not-found]  # as above
import torch  # type: ignore[import-not-found]  # the judge's
import vllm.entrypoints.pooling.utils as pooling  # type: ignore[import-not-found]  # as above
import vllm.utils.serial_utils as serial  # type: ignore[import-not-found]  # as above

_TYPES = {
    "float32": (torch.float32, torch.int32),
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


def read_numbers(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: str) -> torch.Tensor:
    """Reads numbers of any order of bytes as torch does."""
    dtype, words = _TYPES[embed_dtype]
    width = dtype.itemsize
    raw = bytearray(binary)
    if endianness == "big":
        for at in range(0, len(raw), width):
            raw[at : at + width] = raw[at : at + width][::-1]
    return torch.frombuffer(raw, dtype=words).view(dtype).reshape(tuple(shape))


@dataclass
class Place:
    """Where a vector stands in an answer of bytes."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: Sequence[int]


def places(embed_dtype: str, endianness: str, shape: Sequence[int], n_request: int) -> list[Place]:
    size = math.prod(shape) * _TYPES[embed_dtype][0].itemsize
    return [Place(at, embed_dtype, endianness, at * size, (at + 1) * size, shape) for at in range(n_request)]


def read_places(items: list[Place], body: bytes) -> list[torch.Tensor]:
    found = sorted(items, key=lambda item: item.index)
    return [read_numbers(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness) for item in found]


def check_close(
    *,
    embeddings_0_lst: Sequence[Sequence[float]],
    embeddings_1_lst: Sequence[Sequence[float]],
    name_0: str,
    name_1: str,
    tol: float = 1e-3,
) -> None:
    assert len(embeddings_0_lst) == len(embeddings_1_lst) > 0
    for first, second in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        assert len(first) == len(second) > 0
        cosine = torch.nn.functional.cosine_similarity(torch.tensor(first), torch.tensor(second), dim=0)
        assert cosine >= 1 - tol, f"{name_0} and {name_1}: cosine {cosine:.4f}"


def check_reference(
    hf_model: Reference, inputs: list[str], vllm_outputs: Sequence[Sequence[float]], dimensions: int | None = None
) -> None:
    wanted = [vector[:dimensions] for vector in hf_model.encode(inputs)]
    check_close(embeddings_0_lst=wanted, embeddings_1_lst=vllm_outputs, name_0="hf", name_1="server", tol=1e-2)


class Reference:
    """The server's vectors, each text alone and as numbers."""

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(self, texts: list[str], **_: object) -> list[list[float]]:
        url = os.environ["JUDGE_URL"] + "/v1/embeddings"
        answers = [requests.post(url, json={"input": text}, timeout=100).json() for text in texts]
        return [answer["data"][0]["embedding"] for answer in answers]


@pytest.fixture(scope="session")
def hf_runner() -> object:
    return lambda *_, **__: Reference()


serial.EMBED_DTYPES = _TYPES
serial.ENDIANNESS = ("native", "big", "little")
serial.binary2tensor = read_numbers
pooling.MetadataItem = Place
pooling.build_metadata_items = places
pooling.decode_pooling_output = read_places
compared.check_embeddings_close = check_close
embed_utils.float_embeddings = lambda response: [item.embedding for item in response.data]
embed_utils.run_embedding_correctness_test = check_reference
