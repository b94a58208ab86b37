"""Every kind of vocabulary that GGUF files hold, on hand-made ones small enough to see why each token comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ModelFormatError
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import merges_by_score

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ANY_TEXT = st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]))


def gguf(model: str, pieces: list[str], kinds: dict[str, int], **more: object) -> Tokenizer:
    """Builds a vocabulary; ``kinds`` names the pieces that are not ordinary ones."""
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [6 if piece in BYTES else kinds.get(piece, 1) for piece in pieces],
    }
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()})


def written(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special=False)
    return [tokenizer.token_bytes(index).decode("utf-8", "backslashreplace") for index in ids]


# --- Gemma: SentencePiece's BPE without a space prefix, runs of white space as tokens of their own ------------------

GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "  ", "   ", "<b>", *BYTES]
GEMMA_WORDS = ["ab", "\u2581a", "\u2581ab", "\u2581", "a", "b"]


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    special = dict.fromkeys(GEMMA[:4], 3)
    own = dict.fromkeys(GEMMA[4:9], 4)
    pieces = [*GEMMA, *GEMMA_WORDS]
    return gguf(
        "llama",
        pieces,
        special | own,
        # As converters write them: all but ordinary pieces get a score that has no meaning.
        scores=[-1000.0] * len(GEMMA) + [-float(rank) for rank in range(len(GEMMA_WORDS))],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_space_prefix=False,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab ab", ["ab", " ab"]),
        ("a  b", ["a", "  ", "b"]),
        ("a   ab", ["a", "   ", "ab"]),
        ("    ", ["   ", " "]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("<b>a", ["<b>", "a"]),
        ("\u2581\u2581", ["  "]),
        ("<eos>é", ["<eos>", "\\xc3", "\\xa9"]),
    ],
)
def test_gemma_takes_runs_of_white_space_before_words(gemma: Tokenizer, text: str, expected: list[str]) -> None:
    assert written(gemma, text) == expected


@given(ANY_TEXT)
def test_gemma_text_survives_the_round_trip(gemma: Tokenizer, text: str) -> None:
    assert gemma.decode(gemma.encode(text, add_special=False), skip_special=False) == text


def test_gemma_begins_with_bos_and_adds_no_space(gemma: Tokenizer) -> None:
    ids = gemma.encode("ab", add_special=True)

    assert [gemma.token_bytes(index) for index in ids] == [b"<bos>", b"ab"]


def test_merges_come_by_score_then_longest_left_part() -> None:
    pieces = ["a", "b", "c", "ab", "bc", "abc", ""]

    merges = merges_by_score(pieces, [0, 0, 0, -2.0, -1.0, 0.0, 9.0])

    assert merges == [("ab", "c"), ("a", "bc"), ("b", "c"), ("a", "b")]


# --- Gemma 4: the same, with the merges in the file ---------------------------------------------------------------


def test_gemma4_uses_the_merges_of_its_file() -> None:
    pieces = ["<unk>", "<bos>", *BYTES, "\u2581", "a", "b", "ab", "\u2581ab", "\n", "\n\n"]
    tokenizer = gguf(
        "gemma4",
        pieces,
        {"<unk>": 2, "<bos>": 3},
        merges=["\n \n", "a b", "\u2581 ab"],
        bos_token_id=1,
        unknown_token_id=0,
        add_space_prefix=False,
    )

    assert written(tokenizer, "ab ab\n\n\nba") == ["ab", " ab", "\n\n", "\n", "b", "a"]
    assert tokenizer.encode("a", add_special=True)[0] == 1


# --- T5: Unigram --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", "h", "e", "l", "o", "\u2581he", "llo", "\u2581hello"]
    return gguf(
        "t5",
        pieces,
        {"<pad>": 3, "</s>": 3, "<unk>": 2},
        scores=[0.0, 0.0, 0.0, -3.0, -4.0, -4.0, -4.0, -4.0, -2.0, -2.0, -5.0],
        eos_token_id=1,
        unknown_token_id=2,
        remove_extra_whitespaces=True,
        add_bos_token=False,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [8, 9]),  # −2 − 2 is better than −5
        ("  hello   hello ", [8, 9, 8, 9]),
        ("hell", [8, 6, 6]),
        ("hx", [3, 4, 2]),
    ],
)
def test_unigram_takes_the_best_sum_of_scores(unigram: Tokenizer, text: str, expected: list[int]) -> None:
    assert unigram.encode(text, add_special=False) == expected


def test_unigram_ends_with_eos_and_decodes_without_the_first_space(unigram: Tokenizer) -> None:
    ids = unigram.encode("hello hello", add_special=True)

    assert ids[-1] == 1
    assert unigram.decode(ids) == "hello hello"


def test_a_charsmap_that_is_none_is_refused() -> None:
    with pytest.raises(ModelFormatError, match="precompiled_charsmap"):
        gguf("t5", ["<unk>", "a"], {"<unk>": 2}, scores=[0.0, 0.0], unknown_token_id=0, precompiled_charsmap=[300])


# --- BERT: WordPiece ----------------------------------------------------------------------------------------------

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581un", "aff", "able", "\u2581able", "\u2581,"]
BERT_IDS = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}


def test_word_pieces_are_cut_greedily_and_put_between_cls_and_sep() -> None:
    tokenizer = gguf("bert", BERT, dict.fromkeys(BERT[:4], 3), **BERT_IDS)

    ids = tokenizer.encode("Unaffable,  ABLE zzz", add_special=True)

    assert ids == [2, 4, 5, 6, 8, 7, 1, 3]
    assert tokenizer.decode(ids) == "unaffable , able"


def test_a_vocabulary_with_capitals_keeps_the_case() -> None:
    tokenizer = gguf("bert", [*BERT, "\u2581Able"], dict.fromkeys(BERT[:4], 3), **BERT_IDS)

    assert tokenizer.encode("Able able", add_special=False) == [9, 7]
