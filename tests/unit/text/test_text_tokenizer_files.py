"""SentencePiece models and tekken vocabularies encode as their own libraries do, and lying ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import ModelError, ModelFormatError, ModelUnsupportedError
from headrace.registry.selection import choose_files
from headrace.text.sentencepiece import build_sentencepiece
from headrace.text.tekken import build_tekken
from headrace.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden/tokenizers"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())
FILES = {
    "bpe": ("tokenizer.model", "bpe.model"),
    "unigram": ("tokenizer.model", "unigram.model"),
    "tekken": ("tekken.json", "tekken.json"),
}


@pytest.fixture(scope="module", params=FILES)
def golden(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    kind, file = FILES[request.param]
    return request.param, Tokenizer.from_files({kind: GOLDEN / file})


def test_every_text_encodes_as_the_library_that_made_the_file(golden: tuple[str, Tokenizer]) -> None:
    name, tokenizer = golden

    wrong = [
        (text, found, expected)
        for text, expected in zip(CASES["texts"], CASES[name], strict=True)
        if (found := tokenizer.encode(text, add_special=False)) != expected
    ]

    assert len(CASES["texts"]) > 200
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("name", ["bpe", "tekken"])
@given(text=st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
@settings(max_examples=50)
def test_vocabularies_with_bytes_lose_nothing(name: str, text: str) -> None:
    tokenizer = KEPT.setdefault(name, Tokenizer.from_files({FILES[name][0]: GOLDEN / FILES[name][1]}))

    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


KEPT: dict[str, Tokenizer] = {}


@pytest.mark.parametrize(
    ("name", "first", "last"), [("bpe", "<s>", None), ("unigram", None, "</s>"), ("tekken", "<s>", None)]
)
def test_add_special_puts_what_such_models_expect(name: str, first: str | None, last: str | None) -> None:
    tokenizer = Tokenizer.from_files({FILES[name][0]: GOLDEN / FILES[name][1]})

    ids = tokenizer.encode("the worker", add_special=True)

    inner = tokenizer.encode("the worker", add_special=False)
    begin = [tokenizer.token_id(first)] if first else []
    end = [tokenizer.token_id(last)] if last else []
    assert ids == [*begin, *inner, *end]


def test_flags_of_the_configuration_win_over_what_the_kind_expects(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "add_eos_token": true, "eos_token": "</s>"}'
    )
    files = {"tokenizer.model": GOLDEN / "bpe.model", "tokenizer_config.json": tmp_path / "tokenizer_config.json"}

    ids = Tokenizer.from_files(files).encode("x", add_special=True)

    assert ids[0] != 1
    assert ids[-1] == 2


def test_tokenizer_json_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_files({"tokenizer.json": tmp_path / "tokenizer.json", "tokenizer.model": GOLDEN / "bpe.model"})


def test_sentencepiece_files_are_fetched_with_the_weights() -> None:
    names = ["model.safetensors", "tokenizer.model", "other.model", "tekken.json", "config.json"]

    assert sorted(choose_files(names, "hf:x")) == ["config.json", "model.safetensors", "tekken.json", "tokenizer.model"]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_sentencepiece_models_are_refused_or_read(data: st.DataObject) -> None:
    whole = bytearray(SMALL_MODEL)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    message = bytes(whole[: cut or None])

    try:
        build_sentencepiece(message, "m")
    except ModelError:
        return


def small_model() -> bytes:
    """A valid model of few pieces: <unk>, <s>, </s>, the mark, three letters and two joined."""

    def piece(text: str, score: float, kind: int) -> bytes:
        import struct

        raw = text.encode()
        body = b"\x0a" + bytes([len(raw)]) + raw + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
        return b"\x0a" + bytes([len(body)]) + body

    pieces = [
        ("<unk>", 0, 2),
        ("<s>", 0, 3),
        ("</s>", 0, 3),
        ("\u2581", -3, 1),
        ("a", -4, 1),
        ("b", -5, 1),
        ("ab", -1, 1),
    ]
    trainer = b"\x18\x02"  # model_type: bpe
    normalizer = b"\x18\x01\x20\x00"  # a space in front, white space kept
    return (
        b"".join(piece(*one) for one in pieces)
        + b"\x12" + bytes([len(trainer)]) + trainer
        + b"\x1a" + bytes([len(normalizer)]) + normalizer
    )  # fmt: skip


SMALL_MODEL = small_model()


def test_the_small_model_reads() -> None:
    vocabulary = build_sentencepiece(SMALL_MODEL, "m")

    assert vocabulary.tokenizer.encode("ab b").tokens == ["\u2581", "ab", "\u2581", "b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no pieces"),
        (b"\x0a\xff\xff\xff\xff\x0f", "takes 4294967295 bytes"),
        (b"\x0a", "cut off in a number"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 11, "more than 10 bytes"),
        (SMALL_MODEL + b"\x0a\x00", "has 0 characters"),
        (SMALL_MODEL + SMALL_MODEL, "more than once"),
        (SMALL_MODEL + b"\x12\x06\xc8\x02\xff\xff\xff\x7f", "bos_id is 268435455"),
    ],
)
def test_lying_sentencepiece_models_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        build_sentencepiece(data, "m")


def test_kinds_that_no_language_model_uses_are_refused_by_name() -> None:
    with pytest.raises(ModelUnsupportedError, match=r"type word .* this build reads bpe and unigram"):
        build_sentencepiece(SMALL_MODEL + b"\x12\x02\x18\x03", "m")


def tekken(**changes: Any) -> bytes:
    content = json.loads((GOLDEN / "tekken.json").read_text())
    content["config"] |= changes.pop("config", {})
    return json.dumps(content | changes).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tekken vocabulary"),
        (b"[]", "not a tekken vocabulary"),
        (tekken(vocab=[]), "0 tokens are listed"),
        (tekken(config={"default_num_special_tokens": 0}), "with 0 special tokens"),
        (tekken(config={"default_vocab_size": 2**40}), "default_vocab_size is"),
        (tekken(special_tokens=[{"rank": 20, "token_str": "x"}]), "outside 0 to 19"),
        (tekken(special_tokens=[{"rank": 1, "token_str": ""}]), "special token is empty"),
        (tekken(special_tokens=[{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]), "more than once"),
    ],
)
def test_lying_tekken_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        build_tekken(data, "t")


@pytest.mark.parametrize(("token", "message"), [("!!", "not base64"), ("", "rank 300 and 0 bytes")])
def test_lying_tekken_tokens_are_refused(token: str, message: str) -> None:
    content = json.loads((GOLDEN / "tekken.json").read_text())
    content["vocab"][300]["token_bytes"] = token

    with pytest.raises(ModelFormatError, match=message):
        build_tekken(json.dumps(content).encode(), "t")


def test_a_pattern_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(ModelUnsupportedError, match="pattern cannot be run"):
        build_tekken(tekken(config={"pattern": "("}), "t")
