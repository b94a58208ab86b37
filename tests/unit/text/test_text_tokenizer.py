"""Encoding and decoding: special tokens, exact bytes, both vocabularies, and lengths known before encoding."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ContextLengthError, ModelFormatError, ModelUnsupportedError, RequestError
from headrace.testing.tiny_vocabulary import gguf_tokenizer, tokenizer_config, tokenizer_json
from headrace.text.tokenizer import Tokenizer


def scored_vocabulary(**changes: object) -> dict[str, object]:
    """A SentencePiece-like vocabulary: specials, 256 byte tokens and a few pieces with scores."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [-float(n) for n in range(len(words), 0, -1)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(gguf_tokenizer(320))


@pytest.fixture(scope="module")
def scored() -> Tokenizer:
    return Tokenizer.from_gguf(scored_vocabulary())


def write_files(folder: Path, content: dict[str, object]) -> dict[str, Path]:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(512)))
    return {name: folder / name for name in ("tokenizer.json", "tokenizer_config.json")}


def test_files_and_gguf_give_the_same_tokenizer(tmp_path: Path, byte_level: Tokenizer) -> None:
    text = "<|im_start|>user\nthe 12 naïve 🦊s<|im_end|>\n"

    from_files = Tokenizer.from_files(write_files(tmp_path, tokenizer_json(320)))

    assert from_files.encode(text, add_special=True) == byte_level.encode(text, add_special=True)
    assert from_files.bos_token_id == byte_level.bos_token_id == 1
    assert from_files.eos_token_id == byte_level.eos_token_id == 2
    assert from_files.vocab_size == byte_level.vocab_size == 320


def test_padding_and_truncation_of_the_file_do_not_leak(tmp_path: Path) -> None:
    content = tokenizer_json(320)
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<|im_end|>",
    }  # fmt: skip

    tokenizer = Tokenizer.from_files(write_files(tmp_path, content))

    assert len(tokenizer.encode("xyzxyz", add_special=True)) == 6


def test_special_tokens_written_in_text_are_recognised_and_left_out_of_decoded_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>hi", add_special=False)

    assert ids[0] == 1
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special=False) == "<|im_start|>hi"


@given(st.text())
def test_byte_level_text_survives_the_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text, add_special=False), skip_special=False) == text


@given(st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
def test_scored_text_survives_the_round_trip_by_byte_fallback(scored: Tokenizer, text: str) -> None:
    assert scored.decode(scored.encode(text, add_special=False), skip_special=False) == text


def test_scored_vocabulary_merges_by_score_and_begins_with_bos(scored: Tokenizer) -> None:
    ids = scored.encode("hello hello", add_special=True)

    assert [scored.token_bytes(index) for index in ids] == [b"<s>", b" hello", b" hello"]


def test_token_bytes_are_exact_and_empty_outside_the_vocabulary(byte_level: Tokenizer, scored: Tokenizer) -> None:
    ids = byte_level.encode("é", add_special=False)

    assert [byte_level.token_bytes(index) for index in ids] == [b"\xc3", b"\xa9"]
    assert scored.token_bytes(3 + 0xFF) == b"\xff"
    assert byte_level.token_bytes(320) == b""
    assert byte_level.token_bytes(-1) == b""


@given(st.text(alphabet="ab 1é🦊\n", min_size=1, max_size=30))
def test_long_texts_encode_as_short_ones_do(byte_level: Tokenizer, unit: str) -> None:
    # A line break ends a word, so a text is its lines' tokens one after the other.
    line = f"x{unit.replace(chr(10), '')}x\n"

    ids = byte_level.encode(line * 600, add_special=False)

    assert ids == byte_level.encode(line, add_special=False) * 600


def test_encoding_a_long_text_lets_other_threads_run(byte_level: Tokenizer) -> None:
    text = "🦊" * 200_000
    worker = threading.Thread(target=byte_level.encode, args=(text,), kwargs={"add_special": False})
    num_turns = 0

    worker.start()
    while worker.is_alive():
        worker.join(0.001)
        num_turns += 1

    # Were the lock held throughout, this thread would come to its turn once or twice.
    assert num_turns > 20


def test_encode_refuses_lone_surrogates(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        byte_level.encode("a\ud800", add_special=False)

    assert caught.value.stable_code == "invalid_utf8"


@given(st.text(max_size=200))
def test_least_tokens_is_never_more_than_there_are(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.least_tokens(text) <= len(byte_level.encode(text, add_special=False))


def test_least_tokens_stays_true_for_text_that_nfc_shortens(tmp_path: Path) -> None:
    content = tokenizer_json(320) | {"normalizer": {"type": "NFC"}}
    tokenizer = Tokenizer.from_files(write_files(tmp_path, content))
    text = "\u03b1\u0313\u0300\u0345" * 50  # each becomes the one code point U+1F82

    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special=False))


def test_least_tokens_promises_nothing_where_unknown_words_fuse(tmp_path: Path) -> None:
    content = tokenizer_json(320) | {"pre_tokenizer": None, "decoder": None}
    content["model"] = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "<|endoftext|>"}
    content["added_tokens"] = []
    tokenizer = Tokenizer.from_files(write_files(tmp_path, content))

    assert len(tokenizer.encode("x" * 10_000, add_special=False)) == 1
    assert tokenizer.least_tokens("x" * 10_000) == 0


def test_encode_within_gives_the_same_ids_up_to_the_limit(byte_level: Tokenizer) -> None:
    text = "the sea " * 700
    ids = byte_level.encode(text, add_special=True)

    assert byte_level.encode_within(text, add_special=True, limit_tokens=len(ids), param="prompt") == ids
    with pytest.raises(ContextLengthError, match=f"length is {len(ids) - 1} tokens.*least {len(ids)} tokens"):
        byte_level.encode_within(text, add_special=True, limit_tokens=len(ids) - 1, param="prompt")


@pytest.mark.parametrize("unit", ["a", " ", "\u0301", "🦊", "1", "漢", "<|im_end|>"])
def test_encode_within_refuses_long_texts_after_a_look_at_their_beginning(byte_level: Tokenizer, unit: str) -> None:
    looked_at: list[int] = []

    class Watched(Tokenizer):
        def encode(self, text: str, *, add_special: bool) -> list[int]:
            looked_at.append(len(text))
            return super().encode(text, add_special=add_special)

    watched = Watched.from_gguf(gguf_tokenizer(320))
    text = unit * (1_000_000 // len(unit))

    with pytest.raises(ContextLengthError, match="maximum context length"):
        watched.encode_within(text, add_special=False, limit_tokens=1000, param="prompt")

    assert sum(looked_at) <= 8 * 1000 * 5


def test_encode_within_refuses_what_would_take_too_long_though_it_might_fit(tmp_path: Path) -> None:
    content = tokenizer_json(320) | {"pre_tokenizer": None, "decoder": None, "added_tokens": []}
    content["model"] = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "<|endoftext|>"}
    tokenizer = Tokenizer.from_files(write_files(tmp_path, content))

    with pytest.raises(RequestError, match="takes too long") as caught:
        tokenizer.encode_within("x" * 1_000_001, add_special=False, limit_tokens=1000, param="prompt")

    assert caught.value.stable_code == "prompt_too_expensive"


HOSTILE = {
    "no_model": ({"tokenizer.ggml.model": None}, "no tokenizer.ggml.model"),
    "no_tokens": ({"tokenizer.ggml.tokens": []}, "has 0 entries"),
    "tokens_not_a_list": ({"tokenizer.ggml.tokens": "abc"}, "must be an array"),
    "token_not_text": ({"tokenizer.ggml.tokens": [*gguf_tokenizer(320)["tokenizer.ggml.tokens"][:-1], 7]}, "string"),
    "empty_token": ({"tokenizer.ggml.tokens": [*gguf_tokenizer(320)["tokenizer.ggml.tokens"][:-1], ""]}, "string"),
    "huge_token": (
        {"tokenizer.ggml.tokens": [*gguf_tokenizer(320)["tokenizer.ggml.tokens"][:-1], "x" * 2**20]},
        "1 to 4096",
    ),
    "duplicate_token": (
        {"tokenizer.ggml.tokens": [*gguf_tokenizer(320)["tokenizer.ggml.tokens"][:-1], "<|im_end|>"]},
        "more than once",
    ),
    "surrogate_token": (
        {"tokenizer.ggml.tokens": [*gguf_tokenizer(320)["tokenizer.ggml.tokens"][:-1], "\ud800"]},
        "not valid Unicode",
    ),
    "types_too_short": ({"tokenizer.ggml.token_type": [1]}, "1 entries for 320"),
    "type_unknown": ({"tokenizer.ggml.token_type": [9] * 320}, "kinds other than"),
    "merge_of_absent_tokens": ({"tokenizer.ggml.merges": ["zq qz"]}, "do not fit the vocabulary"),
    "merge_without_a_space": ({"tokenizer.ggml.merges": ["abc"]}, "two tokens with a space"),
    "merge_surrogate": ({"tokenizer.ggml.merges": ["\ud800 a"]}, "do not fit the vocabulary"),
    "no_merges": ({"tokenizer.ggml.merges": None}, "has 0 entries"),
    "bos_out_of_range": ({"tokenizer.ggml.bos_token_id": 320}, "is 320, the vocabulary has 320 tokens"),
    "eos_negative": ({"tokenizer.ggml.eos_token_id": -1}, "is -1"),
    "flag_not_a_flag": ({"tokenizer.ggml.add_bos_token": "yes"}, "true or false"),
}


@pytest.mark.parametrize(("changes", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_byte_level_vocabularies_are_refused(changes: dict[str, object], message: str) -> None:
    metadata = {key: value for key, value in (gguf_tokenizer(320) | changes).items() if value is not None}

    with pytest.raises(ModelFormatError, match=message):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("token", ["<0x-1>", "<0xZZ>", "<0x100>", "<0x1>", "0x41"])
def test_hostile_byte_tokens_are_refused(token: str) -> None:
    metadata = scored_vocabulary()
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[3] = token

    with pytest.raises(ModelFormatError, match="byte token"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    "scores", [None, [0.0], [float("nan")] * 269, ["a"] * 269], ids=["none", "short", "nan", "text"]
)
def test_hostile_scores_are_refused(scores: object) -> None:
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf(scored_vocabulary(**{"tokenizer.ggml.scores": scores}))


def test_unknown_vocabulary_kinds_name_what_is_known() -> None:
    with pytest.raises(ModelUnsupportedError, match=r"'martian'; this build knows .*llama-bpe.*smollm"):
        Tokenizer.from_gguf(gguf_tokenizer(320) | {"tokenizer.ggml.pre": "martian"})
    with pytest.raises(ModelUnsupportedError, match="'rwkv'; this build reads gpt2, llama, gemma4, t5, bert"):
        Tokenizer.from_gguf(gguf_tokenizer(320) | {"tokenizer.ggml.model": "rwkv"})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"model": 1}', "\x00"], ids=["empty", "list", "object", "model", "nul"]
)
def test_malformed_tokenizer_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)

    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_files({"tokenizer.json": tmp_path / "tokenizer.json"})


def test_a_model_without_tokenizer_says_so() -> None:
    with pytest.raises(ModelFormatError, match=r"no tokenizer\.json"):
        Tokenizer.from_files({})
