from dataclasses import dataclass, field

import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.history import check, check_words, history_page, versions_of


@dataclass
class Kept:
    version: str
    measured_at_s: float
    figures: dict[str, list[float]] = field(default_factory=dict)


def kept(version: str, at: float, *, slower: float = 1.0, seed: int = 0, wobble: float = 0.0) -> Kept:
    """A run of 20 rounds that vary by 3 %; ``wobble`` is what the whole run shares."""
    random = np.random.default_rng(seed)
    noise = np.exp(random.normal(0, 0.03, 20) + random.normal() * wobble)
    return Kept(
        version,
        at,
        {"E2E p50": (1.2 * slower * noise).tolist(), "output tokens/s": (900 / slower / noise).tolist()},
    )


def test_a_drop_of_a_tenth_is_found_in_every_figure() -> None:
    found = check("s", [kept("0.1", 1), kept("0.2", 2, slower=1.1, seed=1)])

    assert [change.name for change in found.drops] == ["E2E p50", "output tokens/s"]
    assert found.drops[0].ratio == pytest.approx(1.1, rel=0.03)
    assert "DROP from 0.1 (1 runs) to 0.2 (1 runs): E2E p50 +" in check_words(found)


@pytest.mark.parametrize(("slower", "why"), [(1.0, "equal"), (0.8, "faster"), (1.03, "less than 5 %")], ids=str)
def test_what_is_no_drop_is_not_called_one(slower: float, why: str) -> None:
    drops = [
        check("s", [kept("0.1", 1, seed=seed), kept("0.2", 2, slower=slower, seed=100 + seed)]).drops
        for seed in range(20)
    ]

    assert not any(drops), why


def test_several_runs_show_that_the_machine_itself_varies() -> None:
    runs = [kept("0.1", at, seed=at, wobble=0.06) for at in range(5)]
    runs += [kept("0.2", 10 + at, seed=50 + at, wobble=0.06) for at in range(5)]

    assert not check("s", runs).drops


def test_versions_come_in_order_of_their_first_run() -> None:
    runs = [kept("0.2", 5), kept("0.1", 1), kept("0.1", 9), kept("0.3", 7)]

    assert [(version.name, len(version.runs)) for version in versions_of(runs)] == [("0.1", 2), ("0.2", 1), ("0.3", 1)]


def test_any_earlier_version_can_be_held_against() -> None:
    runs = [kept("0.1", 1), kept("0.2", 2, slower=1.2, seed=1), kept("0.3", 3, slower=1.2, seed=2)]

    assert not check("s", runs).drops
    assert check("s", runs, against="0.1").drops


@pytest.mark.parametrize(
    ("runs", "against", "expected"),
    [
        ([kept("0.1", 1)], None, "has 1 versions: a check takes two"),
        ([kept("0.1", 1), kept("0.2", 2)], "0.9", "no version '0.9' before 0.2; there are 0.1"),
        ([kept("0.1", 1), Kept("0.2", 2, {"E2E p50": [1.0] * 9})], None, "no figure with 10 rounds"),
    ],
)
def test_checks_that_can_say_nothing_are_refused(runs: list[Kept], against: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check("s", runs, against=against)


def test_the_page_shows_every_figure_over_the_versions() -> None:
    runs = [kept(f"0.{number}.0", number, slower=1 + 0.01 * number, seed=number) for number in range(30)]

    html = history_page("demo <32>", runs, check("demo <32>", runs))

    assert html.count("<svg") == 2
    assert "History of demo &lt;32&gt;" in html
    assert "24 versions" in html
