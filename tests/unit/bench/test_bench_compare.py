from collections import Counter
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from headrace.base.errors import ConfigError
from headrace.bench.compare import Comparison, Round, Verdict, compare_rounds, cut_rounds, fisher, round_of
from headrace.bench.comparison_page import comparison_page, render_comparison, verdict_words
from headrace.bench.simulated_pairs import compare_pair


def rounds(values: list[float], failed: int = 0, name: str = "E2E p50") -> list[Round]:
    return [Round({name: value}, 100, failed) for value in values]


# scripts/compare-power counts 98 of 100 and 100 of 100; of 20 pairs each, fewer than 17 would come by chance once in
# 10,000 runs of a comparison that is right in 97 of 100.
@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1.0, "no difference"), (1.1, "worse"), (1 / 1.1, "better")],
    ids=["equal", "slower", "faster"],
)
def test_made_up_servers_are_told_apart_as_they_are(ratio: float, expected: str) -> None:
    found = Counter(compare_pair(seed, ratio=ratio).verdict.value for seed in range(20))

    assert found[expected] >= 17


def test_recorded_runs_of_a_drifting_machine_raise_few_false_alarms() -> None:
    found = Counter(compare_pair(seed, ratio=1.0, is_paired=False).verdict.value for seed in range(30))

    assert found["better"] + found["worse"] <= 4  # without regard to the drift: 18 of 100


def test_a_round_has_the_figures_that_its_answers_have(runs: Any) -> None:
    exchanges = [
        runs.exchange(0),
        runs.exchange(1, scheduled_s=2.0, sent_s=2.0, first_s=2.25, chunk_s=(2.25, 3.0), ended_s=3.0, output_tokens=4),
        runs.exchange(2, error="timeout"),
        runs.exchange(3, is_warmup=True, ended_s=90.0),
    ]

    found = round_of(exchanges)
    plain = round_of([runs.exchange(0, operation="embeddings", chunk_s=(), output_tokens=None)])

    assert found.values == pytest.approx(
        {"TTFT p50": 0.25, "TTFT p95": 0.5, "TPOT p50": 0.175, "E2E p50": 1.0, "E2E p95": 1.3, "output tokens/s": 4.5}
    )
    assert (found.num_good, found.num_failed) == (2, 1)
    assert plain.values == pytest.approx({"E2E p50": 1.3, "E2E p95": 1.3, "requests/s": 1 / 1.3})
    assert round_of([]).values == {}


def test_a_run_is_cut_into_equal_rounds_whose_rates_leave_no_time_out(runs: Any) -> None:
    exchanges = [runs.exchange(0, is_warmup=True, ended_s=2.0)] + [
        runs.exchange(index, scheduled_s=float(index), ended_s=2.0 + index, chunk_s=(1.0 + index, 2.0 + index),
                      first_s=1.0 + index, output_tokens=6)
        for index in range(1, 40)
    ]  # fmt: skip

    found = list(cut_rounds(exchanges, len(exchanges), 8))

    assert [one.num_good for one in found] == [4, 5, 5, 5, 5, 5, 5, 5]
    assert [one.values["output tokens/s"] for one in found] == pytest.approx([6.0] * 8)


def test_worse_in_one_figure_is_worse() -> None:
    random = np.random.default_rng(0)
    a, b = (
        [
            Round({"E2E p50": 1 + noise / 100, "TTFT p50": slower + noise / 50}, 100, 0)
            for noise in random.normal(size=12)
        ]
        for slower in (1.0, 1.3)
    )

    found = compare_rounds(a, b, is_paired=True)

    verdicts = {result.name: result.verdict for result in found.results}
    assert verdicts == {"E2E p50": Verdict.SAME, "TTFT p50": Verdict.WORSE}
    assert found.verdict is Verdict.WORSE
    assert "B is worse than A: TTFT p50 +29.4%" in verdict_words(found)


def test_higher_is_better_where_it_is_a_rate() -> None:
    random = np.random.default_rng(0)
    a = rounds([100 + noise for noise in random.normal(size=12)], name="output tokens/s")
    b = rounds([120 + noise for noise in random.normal(size=12)], name="output tokens/s")

    assert compare_rounds(a, b, is_paired=True).verdict is Verdict.BETTER
    assert compare_rounds(b, a, is_paired=True).verdict is Verdict.WORSE


def test_what_could_hide_the_wanted_difference_is_undecided() -> None:
    random = np.random.default_rng(0)
    a, b = (rounds([float(value) for value in random.lognormal(0, 0.3, 12)]) for _ in range(2))

    assert compare_rounds(a, b, is_paired=True).verdict is Verdict.UNDECIDED
    assert compare_rounds(a, b, is_paired=True, find_ratio=0.9).verdict is Verdict.SAME


def test_failing_more_often_is_worse_however_fast_the_rest_is() -> None:
    same = [1.0 + index / 1000 for index in range(12)]

    found = compare_rounds(rounds(same), rounds(same, failed=3), is_paired=True)

    assert found.verdict is Verdict.WORSE
    assert found.notes == ("B failed more often than A: 0 of 1200, 36 of 1236.",)
    assert verdict_words(found) == "B is worse than A: it fails more often."


def test_fisher_is_the_share_of_tables_no_likelier() -> None:
    # The lady tasting tea, Fisher 1935: 4 of 4 against 0 of 4, two-sided.
    assert fisher(0, 4, 4, 4) == pytest.approx(2 / 70)
    assert fisher(0, 100, 0, 100) == 1.0
    assert fisher(3, 100, 3, 100) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (rounds([1.0] * 9), rounds([1.0] * 10), "A has 9 rounds: from 10 to 60 are needed"),
        (rounds([1.0] * 61), rounds([1.0] * 61), "A has 61 rounds"),
        ([Round({}, 0, 9)] * 10, rounds([1.0] * 10), "no figure in common: were any requests answered"),
    ],
)
def test_comparisons_that_can_say_nothing_are_refused(a: list[Round], b: list[Round], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        compare_rounds(a, b, is_paired=False)


def test_a_comparison_can_be_read_in_every_form() -> None:
    found = compare_pair(3, ratio=1.2)

    encoded = msgspec.json.encode(found)
    jsonschema.validate(msgspec.json.decode(encoded), msgspec.json.schema(Comparison))
    assert msgspec.json.decode(encoded, type=Comparison) == found
    markdown, html = render_comparison(found), comparison_page(found)
    assert markdown.startswith("# B beside A\n\n**B is worse than A: TTFT p50 +")
    assert "| (worse) |" in markdown
    assert html.count("<svg") == 4
    assert "Wilcoxon" in html
