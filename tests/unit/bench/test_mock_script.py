"""The mock server's script: what it says is what is drawn, and what is wrong in it is named."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.bench.mock.answers import make_plan, read_asked
from headrace.bench.mock.script import Stall, read_script
from headrace.bench.spread import parse_spread

CHAT = b'{"messages": [{"role": "user", "content": "two words"}], "stream": true, "max_tokens": 6}'


@pytest.mark.parametrize(
    ("start_s", "work_s", "done_s"),
    [
        pytest.param(0.0, 1.0, 1.0, id="none before the first"),
        pytest.param(4.5, 0.4, 4.9, id="ends before one"),
        pytest.param(4.5, 1.0, 6.0, id="half a second lies behind it"),
        pytest.param(5.2, 0.1, 5.6, id="starts within one"),
        pytest.param(5.5, 0.1, 5.6, id="starts as it ends"),
        pytest.param(4.0, 6.0, 11.0, id="across two"),
        pytest.param(5.1, 0.0, 5.5, id="no work has to wait, too"),
    ],
)
def test_no_work_is_done_in_a_stall(start_s: float, work_s: float, done_s: float) -> None:
    assert Stall(every_s=5, for_ms=500).wall_at(start_s, work_s) == pytest.approx(done_s)


@pytest.mark.parametrize("text", ["40", "uniform:20:60", "exponential:40", "lognormal:40:0.5"])
def test_draws_have_the_mean_that_is_said(text: str) -> None:
    spread = parse_spread(text, "ttft_ms")
    rng = random.Random(1)

    drawn = [spread.draw(rng) for _ in range(20_000)]

    # Four standard errors; the widest σ here is 40 (exponential).
    assert statistics.fmean(drawn) == pytest.approx(spread.mean, abs=4 * 40 / 20_000**0.5)
    assert min(drawn) >= 0
    assert str(spread) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "ttft_ms is 'fast'; write 50, uniform"),
        ("uniform:3", "uniform:LOW:HIGH"),
        ("uniform:9:3", "lower end comes first"),
        ("lognormal:-1:2", "at least 0"),
        ("nan", "finite"),
    ],
)
def test_a_number_that_is_none_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_spread(text, "ttft_ms")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttf_ms: 3", r"s\.yaml: .*`ttf_ms`.*did you mean ttft_ms"),
        ("faults: [{kind: explode}]", r"explode.*faults"),
        ("errors: [{status: 200}]", "errors.status is 200; it must be from 400 to 599"),
        ("errors: [{status: 500, ratio: 0.6}, {status: 429, ratio: 0.6}]", "at most 1 together"),
        ("stall: {every_s: 1, for_ms: 2000}", "leaves no time to work"),
        ("tokens_per_chunk: 0", "tokens_per_chunk is 0; it must be at least 1"),
        ("text: ''", "text .in words. is 0"),
        ("- 1", r"s\.yaml is no mock script"),
    ],
)
def test_what_is_wrong_in_a_script_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "s.yaml").write_text(text)

    with pytest.raises(ConfigError, match=said):
        read_script(tmp_path / "s.yaml", {})


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("ttft_ms: 3\nitl_ms: uniform:1:2\n")

    script = read_script(tmp_path / "s.yaml", {"ttft_ms": "7", "itl_ms": None})

    assert script.ttft_ms.first == 7
    assert str(script.itl_ms) == "uniform:1:2"


def test_the_same_seed_and_number_draw_the_same_plan() -> None:
    flags = {"ttft_ms": "lognormal:50:0.5", "itl_ms": "exponential:5", "faults": [{"kind": "hang", "ratio": 0.5}]}
    asked = read_asked("chat", CHAT)

    plans = [make_plan(read_script(None, {**flags, "seed": 3}), 11, "chat", asked) for _ in range(2)]
    other = make_plan(read_script(None, {**flags, "seed": 4}), 11, "chat", asked)

    assert plans[0] == plans[1]
    assert plans[0] != other


def test_chunks_and_writes_carry_the_tokens_they_should_and_are_due_with_the_last_of_them() -> None:
    script = read_script(None, {"ttft_ms": 100, "itl_ms": 10, "tokens_per_chunk": 2, "chunks_per_write": 2})

    plan = make_plan(script, 0, "chat", read_asked("chat", CHAT.replace(b"6}", b"7}")))

    assert plan.chunks == ((2, 2), (2, 1))
    assert plan.due_s == pytest.approx((0.120, 0.160))


@pytest.mark.parametrize(
    ("tokens", "asked_tokens", "num_tokens"),
    [(None, b"6", 6), ("4", b"6", 4), ("9", b"6", 6), (None, b"null", 16), ("40", b"null", 40)],
)
def test_an_answer_is_as_long_as_script_and_request_allow(
    tokens: str | None, asked_tokens: bytes, num_tokens: int
) -> None:
    script = read_script(None, {"tokens": tokens})

    plan = make_plan(script, 0, "chat", read_asked("chat", CHAT.replace(b"6}", asked_tokens + b"}")))

    assert plan.num_tokens == num_tokens
