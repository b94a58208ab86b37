"""GGUF headers that lie: each length is checked against what is left before anything is allocated."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.base.errors import ModelFormatError
from headrace.registry.files import map_file
from headrace.registry.formats.gguf import GgufFile, open_gguf, parse_gguf
from headrace.registry.formats.gguf_vocabulary import check_vocabulary
from headrace.testing.tiny import TinyShape, tiny_tensors, write_tiny_gguf
from headrace.testing.tiny_blocks import Encoded
from headrace.testing.tiny_files import gguf_bytes
from headrace.testing.tiny_vocabulary import gguf_tokenizer

UINT8, UINT32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(
    name: bytes = b"t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name)
        + struct.pack("<I", len(shape) if num_dims is None else num_dims)
        + dims
        + struct.pack("<IQ", kind, offset)
    )


def file_of(
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    counts = (len(infos) if num_tensors is None else num_tensors, len(pairs) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def parse(content: bytes) -> GgufFile:
    return parse_gguf(memoryview(content), Path("model.gguf"))


def test_metadata_and_tensors_come_back(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", matrix_type="F32", embedding_type="Q8_0")

    parsed = open_gguf(path)

    down = tiny_tensors(TinyShape(), 0)["model.layers.1.mlp.down_proj.weight"]
    found = parsed.tensors["blk.1.ffn_down.weight"]
    assert (found.dtype, found.shape) == ("F32", (64, 96))
    assert np.array_equal(found.data.view(np.float32).reshape(64, 96), down)
    assert parsed.metadata["llama.block_count"] == 2
    assert parsed.metadata["tokenizer.ggml.tokens"][1] == "<|im_start|>"
    assert parsed.metadata["tokenizer.ggml.add_bos_token"] is False
    assert parsed.metadata["llama.rope.freq_base"] == 10000.0
    assert parsed.tensors["token_embd.weight"].data.nbytes == 320 * 2 * 34


def test_our_reader_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", matrix_type="Q4_1")

    oracle = gguf.GGUFReader(str(path))
    parsed = open_gguf(path)

    assert [tensor.name for tensor in oracle.tensors] == list(parsed.tensors)
    for tensor in oracle.tensors:
        mine = parsed.tensors[tensor.name]
        assert mine.dtype == tensor.tensor_type.name
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
        assert np.array_equal(mine.data, tensor.data.reshape(-1).view(np.uint8))


def test_a_custom_alignment_moves_the_data() -> None:
    content = file_of((pair(b"general.alignment", UINT32, struct.pack("<I", 64)),), (info(),))
    content = content.ljust(len(content) + -len(content) % 64, b"\0") + np.arange(8, dtype=np.float32).tobytes()

    assert parse(content).tensors["t"].data.view(np.float32)[7] == 7


DATA = bytes(64)
LIES = {
    "no_bytes": (b"", "the magic number"),
    "wrong_magic": (file_of(magic=b"GGML"), "starts with"),
    "version_0": (file_of(version=0), "version is 0"),
    "version_1": (file_of(version=1), "version is 1"),
    "big_endian": (file_of(version=0x03000000), "big-endian"),
    "tensors_2_64": (file_of(num_tensors=2**64 - 1), "claims 18446744073709551615 tensors"),
    "keys_2_64": (file_of(num_keys=2**64 - 1), "claims 18446744073709551615 keys"),
    "keys_beyond_file": (file_of(num_keys=1000), "bytes are left"),
    "tensors_beyond_file": (file_of(num_tensors=1000), "bytes are left"),
    "key_length_beyond": (file_of((struct.pack("<Q", 60_000),), num_keys=1), "only"),
    "key_length_huge": (file_of((struct.pack("<Q", 2**62) + bytes(20),)), "the limit is"),
    "key_twice": (file_of((pair(b"a", UINT8, b"\1"), pair(b"a", UINT8, b"\1"))), "there twice"),
    "key_empty": (file_of((pair(b"", UINT8, b"\1" * 8),)), "not printable"),
    "key_not_utf8": (file_of((pair(b"\xff", UINT8, b"\1" * 8),)), "not UTF-8"),
    "value_type": (file_of((pair(b"a", 13, b"\1" * 8),)), "unknown"),
    "bool_2": (file_of((pair(b"a", BOOL, b"\2" * 8),)), "neither 0 nor 1"),
    "string_beyond": (file_of((pair(b"a", STRING, struct.pack("<Q", 10_000)),)), "only"),
    "string_huge": (file_of((pair(b"a", STRING, struct.pack("<Q", 2**64 - 1)),)), "the limit is"),
    "array_nested": (file_of((pair(b"a", ARRAY, array(ARRAY, 1)),)), "array of arrays"),
    "array_item_type": (file_of((pair(b"a", ARRAY, array(99, 1)),)), "unknown"),
    "array_2_64": (file_of((pair(b"a", ARRAY, array(UINT32, 2**64 - 1)),)), "items"),
    "array_beyond": (file_of((pair(b"a", ARRAY, array(UINT32, 100_000)),)), "only"),
    "strings_beyond": (file_of((pair(b"a", ARRAY, array(STRING, 100_000)),)), "claims 100000 strings"),
    "strings_lie": (file_of((pair(b"a", ARRAY, array(STRING, 1, struct.pack("<Q", 2**63))),)), "passes the end"),
    "strings_not_utf8": (file_of((pair(b"a", ARRAY, array(STRING, 1, text(b"\xff"))),)), "not UTF-8"),
    "alignment_0": (file_of((pair(b"general.alignment", UINT32, struct.pack("<I", 0)),)), "power of two"),
    "alignment_24": (file_of((pair(b"general.alignment", UINT32, struct.pack("<I", 24)),)), "power of two"),
    "alignment_2_31": (file_of((pair(b"general.alignment", UINT32, struct.pack("<I", 2**31)),)), "power of two"),
    "alignment_text": (file_of((pair(b"general.alignment", STRING, text(b"32")),)), "power of two"),
    "name_empty": (file_of((), (info(b""),), DATA), "empty"),
    "name_long": (file_of((), (info(b"n" * 300),), DATA), "the limit is 256"),
    "dims_0": (file_of((), (info(num_dims=0),), DATA), "dimensions"),
    "dims_5": (file_of((), (info(shape=(1,) * 5),), DATA), "dimensions"),
    "dims_2_32": (file_of((), (info(num_dims=2**32 - 1),), DATA), "dimensions"),
    "dim_zero": (file_of((), (info(shape=(8, 0)),), DATA), "zero"),
    "dims_overflow": (file_of((), (info(shape=(2**40, 2**40)),), DATA), "2^63"),
    "dims_wrap_to_small": (file_of((), (info(shape=(2**32, 2**32 + 1)),), DATA), "2^63"),
    "type_unknown": (file_of((), (info(kind=77),), DATA), "type 77 is unknown"),
    "type_removed": (file_of((), (info(kind=4),), DATA), "type 4 is unknown"),
    "block_not_whole": (file_of((), (info(shape=(33,), kind=8),), DATA), "block of 32"),
    "offset_unaligned": (file_of((), (info(offset=4),), DATA), "alignment"),
    "offset_beyond": (file_of((), (info(offset=2**40),), DATA), "truncated or the header lies"),
    "offset_wraps": (file_of((), (info(offset=2**64 - 32),), DATA), "truncated or the header lies"),
    "size_beyond": (file_of((), (info(shape=(64,)),), DATA), "truncated or the header lies"),
    "no_data": (file_of((), (info(),)), "truncated or the header lies"),
    "overlap": (file_of((), (info(b"a"), info(b"b")), DATA), "overlap"),
    "tensor_twice": (file_of((), (info(b"a"), info(b"a", offset=32)), DATA), "there twice"),
}


@pytest.mark.parametrize(("content", "words"), LIES.values(), ids=LIES.keys())
def test_lying_headers_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(ModelFormatError) as caught:
        parse(content)

    assert caught.value.message.startswith("model.gguf: ")
    assert words in caught.value.message
    assert caught.value.message.isprintable()


VOCABULARY = gguf_tokenizer(300)
HOSTILE = {
    "byte_token_negative": ({"tokens": ["<0x-1>", "a"], "token_type": [6, 1], "merges": []}, "should look like <0x0A>"),
    "byte_token_letters": ({"tokens": ["<0xZZ>", "a"], "token_type": [6, 1], "merges": []}, "should look like <0x0A>"),
    "token_empty": ({"tokens": ["", "a"], "token_type": [1, 1], "merges": []}, "is empty"),
    "token_of_1_mb": ({"tokens": ["a" * 2**20, "b"], "token_type": [1, 1], "merges": []}, "characters"),
    "token_twice": ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "there twice"),
    "tokens_not_text": ({"tokens": [1, 2]}, "array of strings"),
    "types_short": ({"token_type": [1]}, "one per token"),
    "scores_short": ({"scores": [0.0]}, "one per token"),
    "merge_absent": ({"merges": ["q zzz"]}, "does not join"),
    "merge_unjoined": ({"merges": ["qq"]}, "does not join"),
    "merge_result_absent": ({"merges": ["q q"]}, "does not join"),
    "bos_out_of_range": ({"bos_token_id": 300}, "vocabulary has 300"),
    "eos_negative": ({"eos_token_id": -1}, "vocabulary has 300"),
    "pad_not_a_number": ({"padding_token_id": "2"}, "should be a token id"),
}


@pytest.mark.parametrize(("change", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_vocabularies_are_refused(change: dict[str, object], words: str) -> None:
    metadata = {**VOCABULARY, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    if "tokens" in change:
        metadata = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}

    with pytest.raises(ModelFormatError) as caught:
        check_vocabulary(metadata, Path("model.gguf"))

    assert words in caught.value.message
    assert len(caught.value.message) < 400


def test_an_honest_vocabulary_passes() -> None:
    check_vocabulary({**VOCABULARY, "tokenizer.ggml.padding_token_id": 2**32 - 1}, Path("model.gguf"))


def test_a_file_of_metadata_only_parses() -> None:
    assert parse(gguf_bytes({"general.architecture": "llama"}, {})).tensors == {}


def test_blocks_have_the_size_their_type_says() -> None:
    row = Encoded("Q4_0", (1, 32), bytes(18))

    assert parse(gguf_bytes({}, {"t": row})).tensors["t"].data.nbytes == 18


def test_the_vocabulary_can_be_left_out(tmp_path: Path) -> None:
    data = map_file(write_tiny_gguf(tmp_path / "m.gguf"))

    whole = parse_gguf(data, Path("m.gguf"))
    without = parse_gguf(data, Path("m.gguf"), has_vocabulary=False)

    left_out = {f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges")}
    assert without.metadata == {key: value for key, value in whole.metadata.items() if key not in left_out}
    assert without.tensors.keys() == whole.tensors.keys()


def test_a_lying_vocabulary_is_refused_even_when_left_out() -> None:
    lie = file_of((pair(b"tokenizer.ggml.tokens", ARRAY, array(STRING, 1, struct.pack("<Q", 2**63))),))

    with pytest.raises(ModelFormatError, match="passes the end"):
        parse_gguf(memoryview(lie), Path("m.gguf"), has_vocabulary=False)


@pytest.mark.parametrize("has_vocabulary", [True, False])
def test_a_header_longer_than_its_first_copy_is_read_to_its_end(has_vocabulary: bool) -> None:
    # 6 MiB of strings in one array, one string of 3 MiB, then a number: the copy grows inside each.
    tokens = b"".join(text(b"%04d" % (index % 10_000) * 32) for index in range(45_000))
    pairs = (
        pair(b"tokenizer.ggml.tokens", ARRAY, array(STRING, 45_000, tokens)),
        pair(b"general.description", STRING, text(b"x" * (3 * 2**20))),
        pair(b"llama.block_count", UINT32, struct.pack("<I", 7)),
    )
    whole = memoryview(file_of(pairs, (info(),), bytes(32)))

    found = parse_gguf(whole, Path("long.gguf"), has_vocabulary=has_vocabulary)

    assert found.metadata["llama.block_count"] == 7
    assert len(found.metadata["general.description"]) == 3 * 2**20
    assert found.metadata.get("tokenizer.ggml.tokens", ["0000" * 32])[0] == "0000" * 32
    with pytest.raises(ModelFormatError, match="passes the end"):
        parse_gguf(whole[: 5 * 2**20], Path("cut.gguf"), has_vocabulary=has_vocabulary)
