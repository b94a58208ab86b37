"""`bench serve`: its options read, and the picture of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.bench.load import Snapshot
from headrace.cli.bench_live import Screen, chart, done_ratio
from headrace.cli.bench_options import read_fields, read_headers
from headrace.cli.bench_serve import read_warmup


def snapshot(elapsed_s: float, num_ended: int, **values: object) -> Snapshot:
    known: dict[str, object] = {
        "num_total": 400,
        "total_s": None,
        "num_sent": num_ended + 3,
        "num_failed": 0,
        "num_in_flight": 3,
        "num_chunks": 8 * num_ended,
        "output_tokens": 8 * num_ended,
        "latest_s": ((0.025, 0.080),),
    }
    return Snapshot(elapsed_s=elapsed_s, num_ended=num_ended, **{**known, **values})  # type: ignore[arg-type]


def test_a_key_in_the_environment_becomes_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k")

    assert read_headers(["X-Team: a: b"], "MY_KEY") == {"authorization": "Bearer k", "x-team": "a: b"}
    assert read_headers([], "OTHER_KEY") == {}


@pytest.mark.parametrize(("text", "read"), [("0", (0, 0.0)), ("50", (50, 0.0)), ("10s", (0, 10.0)), ("0.5s", (0, 0.5))])
def test_a_warm_up_is_requests_or_seconds(text: str, read: tuple[int, float]) -> None:
    assert read_warmup(text) == read


def test_fields_are_json_and_else_text() -> None:
    texts = ["temperature=0", "stop=[1]", "user=me", "a={}=b"]

    assert read_fields(texts) == {"temperature": 0, "stop": [1], "user": "me", "a": "{}=b"}


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda: read_warmup("ten"), "--warmup is 'ten'; write 50"),
        (lambda: read_warmup("-1"), "at least 0"),
        (lambda: read_fields(["temperature"]), "write NAME=JSON"),
        (lambda: read_headers(["nothing"], "NO_KEY"), "write NAME: VALUE"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_form(read: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read()  # type: ignore[operator]


def test_a_chart_is_as_high_as_its_values() -> None:
    assert chart([0.0, 1.0, None, 4.0, 8.0]) == "▁▁ ▄█"
    assert chart([]) == ""


def test_progress_is_by_requests_or_time_whichever_is_further() -> None:
    assert done_ratio(snapshot(5.0, 100)) == 0.25
    assert done_ratio(snapshot(5.0, 100, total_s=10.0)) == 0.5
    assert done_ratio(snapshot(5.0, 100, num_total=None)) is None


def test_the_picture_fits_a_terminal_of_eighty_columns_and_says_what_counts() -> None:
    screen = Screen()
    for second in range(60):
        screen.add(snapshot(float(second), 10 * second, num_failed=second // 30))

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen.render())
    lines = console.export_text().splitlines()

    assert all(len(line) <= 80 and "…" not in line for line in lines)
    text = "\n".join(lines)
    for part in ("590 of 400 answered, 3 under way", "1 failed", "10.0 a second", "25.0 ms median", "█"):
        assert part in text
