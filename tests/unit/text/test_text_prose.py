from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.text.prose import read_text, shipped_text


def test_the_shipped_text_is_plain_english_prose() -> None:
    text = shipped_text()

    assert 20_000 < len(text) < 60_000
    assert text.isascii()
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole\n\nAlice was beginning")


def test_texts_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    (tmp_path / "large").write_bytes(b"a" * (2**20 + 1))

    with pytest.raises(ConfigError, match=r"is not UTF-8 text .* at byte 2"):
        read_text(tmp_path / "binary")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        read_text(tmp_path / "large")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_text(tmp_path / "none")
