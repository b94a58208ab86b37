"""HEAD against numpy: log-sum-exp, ranked log-probabilities, penalties, masks, filters, draws, and rows gone wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels.vm import available_isas, best_isa
from headrace.program.opcodes import Layout
from headrace.program.sampling import choose, modified, uniform
from headrace.testing.lone_op import F32, Choice, LoneHead

ISAS = available_isas()
VOCAB = 5003  # neither a multiple of 16 nor of 128 slices


def random_logits(rows: int, vocab: int = VOCAB, *, spread: float = 3.0, seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


def log_softmax(logits: F32) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))


def ranked(logits: F32) -> NDArray[np.int64]:
    return np.lexsort((np.arange(len(logits)), -logits))


def wanted(logits: F32, choice: Choice) -> int:
    fields = {**choice.fields(), "seed": choice.seed}
    keys = modified(logits, fields, sorted(choice.counts), sorted(choice.bias), choice.allowed)
    return choose(keys, fields)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 127, 1000, 2048, VOCAB])
def test_logsumexp_and_greedy_agree_with_numpy_for_any_vocabulary(vocab: int, isa: str) -> None:
    logits = random_logits(5, vocab)
    vm = LoneHead(logits, isa=isa, max_top=0)

    out = vm.step([Choice(row) for row in range(5)])

    np.testing.assert_array_equal(out.results["token"], logits.argmax(axis=1))
    np.testing.assert_array_equal(out.results["status"], 0)
    wide = logits.astype(np.float64)
    np.testing.assert_allclose(out.results["logsumexp"], np.log(np.exp(wide).sum(axis=1)), rtol=0, atol=4e-6)
    np.testing.assert_allclose(out.results["logprob"], log_softmax(logits).max(axis=1), rtol=0, atol=4e-6)


def test_greedy_ties_go_to_the_lowest_id_on_any_number_of_threads() -> None:
    logits = random_logits(3)
    logits[0, [4900, 17, 33, 2500]] = 50.0
    logits[1] = 0.0
    logits[2, [VOCAB - 1, VOCAB - 2]] = 60.0

    for threads in (1, 2, 3, 7):
        out = LoneHead(logits, threads=threads, isa=best_isa()).step([Choice(row) for row in range(3)])
        np.testing.assert_array_equal(out.results["token"], [17, 0, VOCAB - 2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("count", [1, 20, 256])
def test_top_logprobs_are_sorted_with_ties_by_id_and_of_the_unmodified_distribution(count: int, isa: str) -> None:
    logits = random_logits(4)
    logits[1] = np.round(logits[1])  # many ties
    logits[2] = 1.0
    choices = [Choice(row, num_logprobs=count, bias=[(7, 100.0)], temperature=float(row)) for row in range(4)]

    out = LoneHead(logits, threads=2, isa=isa).step(choices)

    for row in range(4):
        want = ranked(logits[row])[:count]
        assert out.results["num_top"][row] == count
        np.testing.assert_array_equal(out.top_ids[row, :count], want)
        np.testing.assert_allclose(out.top_logprobs[row, :count], log_softmax(logits[row])[want], rtol=0, atol=4e-6)


def test_more_logprobs_than_the_vocabulary_gives_the_whole_vocabulary() -> None:
    logits = random_logits(1, 40)

    out = LoneHead(logits, isa=best_isa()).step([Choice(0, num_logprobs=200)])

    assert out.results["num_top"][0] == 40
    np.testing.assert_array_equal(out.top_ids[0, :40], ranked(logits[0]))


@pytest.mark.parametrize("isa", ISAS)
def test_scale_and_softcap_apply_to_the_logits(isa: str) -> None:
    logits = random_logits(2, 500, spread=10.0)

    out = LoneHead(logits, isa=isa, scale=0.5, softcap=4.0).step([Choice(row, num_logprobs=0) for row in range(2)])

    capped = 4.0 * np.tanh(logits.astype(np.float64) * 0.5 / 4.0)
    np.testing.assert_allclose(out.results["logsumexp"], np.log(np.exp(capped).sum(axis=1)), rtol=0, atol=8e-6)


def test_a_target_is_scored_and_nothing_is_chosen() -> None:
    logits = random_logits(2)
    choices = [Choice(0, target=4321, temperature=1.0), Choice(1, target=VOCAB - 1, bias=[(VOCAB - 1, 9.0)])]

    out = LoneHead(logits, isa=best_isa()).step(choices)

    np.testing.assert_array_equal(out.results["token"], [4321, VOCAB - 1])
    want = [log_softmax(logits)[0, 4321], log_softmax(logits)[1, VOCAB - 1]]
    np.testing.assert_allclose(out.results["logprob"], want, rtol=0, atol=4e-6)


ALLOWED = np.random.default_rng(5).random(VOCAB) < 0.01
MODIFIERS = [
    pytest.param({"repetition": 1.7, "counts": [(i, -1) for i in range(0, VOCAB, 3)]}, id="repetition"),
    pytest.param({"presence": 4.0, "counts": [(i, 1) for i in range(1, VOCAB, 2)]}, id="presence"),
    pytest.param({"frequency": 1.5, "counts": [(i, i % 5) for i in range(VOCAB)]}, id="frequency"),
    pytest.param(
        {"repetition": 1.2, "presence": -0.5, "frequency": 0.7, "counts": [(i, -1 - i % 3) for i in range(VOCAB)]},
        id="all penalties",
    ),
    pytest.param({"bias": [(0, 3.0), (16, 30.0), (VOCAB - 1, 30.5)]}, id="bias"),
    pytest.param({"bias": [(i, -100.0) for i in range(0, VOCAB, 2)]}, id="many biases"),
    pytest.param({"allowed": ALLOWED}, id="mask"),
    pytest.param(
        {"allowed": ALLOWED, "bias": [(int(ALLOWED.argmax()), 40.0), (3000, 80.0)], "repetition": 1.1,
         "counts": [(int(ALLOWED.argmax()), 2)]},
        id="mask, bias and penalty",
    ),
]  # fmt: skip


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_penalties_bias_and_mask_choose_as_numpy_does(modifier: dict[str, object], isa: str) -> None:
    logits = random_logits(3)
    base = [
        Choice(0),
        Choice(1, temperature=0.8, seed=3, position=9),
        Choice(2, temperature=1.0, top_p=0.6, seed=4, position=2),
        Choice(0, temperature=1.0, top_k=5, seed=1 << 40, position=77),
    ]
    choices = [dataclasses.replace(choice, **modifier) for choice in base]  # type: ignore[arg-type]  # a table of fields

    out = LoneHead(logits, threads=2, isa=isa).step(choices)

    tokens = [wanted(logits[choice.row], choice) for choice in choices]
    np.testing.assert_array_equal(out.results["token"], tokens)
    want = [log_softmax(logits)[choice.row, token] for choice, token in zip(choices, tokens, strict=True)]
    np.testing.assert_allclose(out.results["logprob"], want, rtol=0, atol=1e-5)


FILTERS = [
    pytest.param({}, id="none"),
    pytest.param({"temperature": 0.3}, id="cold"),
    pytest.param({"temperature": 8.0}, id="hot"),
    pytest.param({"top_k": 1}, id="top_k 1"),
    pytest.param({"top_k": 40}, id="top_k 40"),
    pytest.param({"top_k": 256}, id="top_k 256"),
    pytest.param({"top_k": 257, "temperature": 3.0}, id="top_k 257"),
    pytest.param({"top_k": 3000, "temperature": 9.0}, id="top_k 3000"),
    pytest.param({"top_k": VOCAB + 5}, id="top_k above vocabulary"),
    pytest.param({"top_p": 1e-6}, id="top_p least"),
    pytest.param({"top_p": 0.5}, id="top_p 0.5"),
    pytest.param({"top_p": 0.95, "temperature": 5.0}, id="top_p wide"),
    pytest.param({"top_p": 0.9, "top_k": 1000, "temperature": 4.0}, id="top_p after top_k 1000"),
    pytest.param({"top_p": 0.7, "top_k": 50}, id="top_p after top_k 50"),
    pytest.param({"min_p": 0.05}, id="min_p"),
    pytest.param({"min_p": 0.0001, "temperature": 4.0}, id="min_p wide"),
    pytest.param({"min_p": 1.0}, id="min_p 1"),
    pytest.param({"min_p": 0.02, "top_p": 0.9, "top_k": 30, "temperature": 1.3}, id="all three"),
    pytest.param({"min_p": 0.02, "top_p": 0.99, "temperature": 6.0}, id="min_p and wide top_p"),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_filters_choose_as_the_reference_does(spread: float, filters: dict[str, float], isa: str) -> None:
    logits = random_logits(4, spread=spread)
    draws = 20 if isa == "scalar" else 60
    settings = {"temperature": 1.0, **filters}
    choices = [
        Choice(i % 4, seed=1000 + i, position=i, **settings)  # type: ignore[arg-type]  # a table of fields
        for i in range(draws)
    ]

    out = LoneHead(logits, threads=2, isa=isa).step(choices)

    want = [wanted(logits[choice.row], choice) for choice in choices]
    np.testing.assert_array_equal(out.results["token"], want)


def test_a_flat_distribution_over_a_real_vocabulary_is_filtered_exactly() -> None:
    vocab = 49152
    logits = random_logits(2, vocab, spread=0.01)
    choices = [
        Choice(i % 2, temperature=1.0, seed=i, position=i, top_p=top_p)
        for i, top_p in enumerate([0.001, 0.01, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0, 0.3, 0.7, 0.05])
    ]

    out = LoneHead(logits, threads=2, isa=best_isa(), max_rows=32).step(choices)

    want = [wanted(logits[choice.row], choice) for choice in choices]
    np.testing.assert_array_equal(out.results["token"], want)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="no filter"),
        pytest.param({"top_k": 7}, id="top_k"),
        pytest.param({"top_p": 0.8}, id="top_p"),
        pytest.param({"temperature": 2.5, "min_p": 0.1}, id="min_p"),
    ],
)
def test_draws_follow_the_distribution(settings: dict[str, float]) -> None:
    logits = random_logits(1, 24, spread=1.0)
    settings = {"temperature": 1.0, **settings}
    vm = LoneHead(logits, isa=best_isa(), max_rows=250)
    draws = 20_000

    tokens = np.concatenate(
        [
            vm.step(
                [
                    Choice(0, seed=99, position=position, **settings)  # type: ignore[arg-type]  # a table of fields
                    for position in range(start, start + 250)
                ]
            ).results["token"]
            for start in range(0, draws, 250)
        ]
    )

    weights = np.exp(logits[0].astype(np.float64) / settings["temperature"])
    weights[ranked(logits[0])[int(settings.get("top_k", 24)) :]] = 0
    order = ranked(logits[0])
    sums = np.cumsum(weights[order]) / weights.sum()
    weights[order[1:][sums[:-1] >= settings.get("top_p", 1.0)]] = 0
    weights[weights < settings.get("min_p", 0.0) * weights.max()] = 0
    counts = np.bincount(tokens, minlength=24)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    share = weights[kept] / weights.sum()
    chi_square = ((counts[kept] - draws * share) ** 2 / (draws * share)).sum()
    # Mean n - 1 and variance 2(n - 1): six standard deviations, and the seed is fixed.
    freedom = kept.sum() - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_random_numbers_are_philox_of_seed_and_position() -> None:
    # Random123's known answers for philox4x32-10: counter and key all zeros, first words 6627e8d5 e169c58d.
    assert uniform(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) * 2.0**-53
    # A flat row of 2^k ids turns the draw into its first bits.
    vm = LoneHead(np.zeros((1, 4096), np.float32), isa=best_isa())
    pairs = [(0, 0), (0, 1), (1, 0), (2**63 + 12345, 2**31 - 1), (2**64 - 1, 7)]

    out = vm.step([Choice(0, temperature=1.0, seed=seed, position=position) for seed, position in pairs])

    np.testing.assert_array_equal(out.results["token"], [int(uniform(*pair) * 4096) for pair in pairs])


def test_threads_batch_mates_and_order_change_no_bit() -> None:
    logits = random_logits(8, spread=1.0)
    kinds: list[dict[str, object]] = [
        {"num_logprobs": 20},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "num_logprobs": 3},
        {"temperature": 1.5, "min_p": 0.01, "bias": [(5, 2.0)], "repetition": 1.3, "counts": [(9, 1), (11, -3)]},
        {"target": 17},
        {"temperature": 2.0, "allowed": ALLOWED},
        {"temperature": 1.0, "top_k": 900},
    ]
    choices = [
        Choice(row, seed=row, position=row * 3, **kind)  # type: ignore[arg-type]  # a table of fields
        for row in range(8)
        for kind in kinds
    ]
    alone = LoneHead(logits, isa=best_isa())
    want = [alone.step([choice]) for choice in choices]

    for threads in (1, 2, 3, 5):
        vm = LoneHead(logits, threads=threads, isa=best_isa())
        for order in (range(64), range(63, -1, -1)):
            out = vm.step([choices[i] for i in order])
            for at, i in enumerate(order):
                assert out.results[at].tobytes() == want[i].results[0].tobytes()
                top = want[i].results["num_top"][0]
                np.testing.assert_array_equal(out.top_ids[at, :top], want[i].top_ids[0, :top])
                np.testing.assert_array_equal(out.top_logprobs[at, :top], want[i].top_logprobs[0, :top])


def test_instruction_sets_give_the_same_bits() -> None:
    logits = random_logits(4)
    choices = [
        Choice(0, num_logprobs=5),
        Choice(1, temperature=1.0, seed=5),
        Choice(2, temperature=3.0, top_p=0.97, seed=6),
        Choice(3, temperature=1.0, top_p=0.9, top_k=40, seed=7),
    ]

    outs = [LoneHead(logits, isa=isa).step(choices).results.tobytes() for isa in ISAS]

    assert all(out == outs[0] for out in outs)


@pytest.mark.parametrize("layout", [Layout.F32, Layout.BF16, Layout.F16, Layout.Q8, Layout.Q4, Layout.Q4M])
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_that_is_not_a_number_says_so_and_spoils_no_neighbour(isa: str, layout: Layout) -> None:
    logits = random_logits(5, 700)
    logits[2] = 0.0  # what the broken row's weights are: a quantised group must be the same in both
    broken = logits.copy()
    broken[2] = np.nan
    choices = [
        Choice(0),
        Choice(1, temperature=1.0, seed=1),
        Choice(2, temperature=1.0, top_p=0.9, num_logprobs=5),
        Choice(2, target=3),
        Choice(2, temperature=1.0),
        Choice(2),
        Choice(3, temperature=1.0, top_p=0.5, num_logprobs=5),
        Choice(4, num_logprobs=1),
    ]

    got = LoneHead(broken, layout=layout, isa=isa, threads=2).step(choices)
    want = LoneHead(logits, layout=layout, isa=isa).step(choices)

    np.testing.assert_array_equal(got.results["status"], [0, 0, 1, 1, 1, 1, 0, 0])
    assert not np.isfinite(got.results["logsumexp"][2:6]).any()
    for i in (0, 1, 6, 7):
        assert got.results[i].tobytes() == want.results[i].tobytes()


def test_a_mask_that_allows_nothing_gives_no_token() -> None:
    logits = random_logits(1)
    none = np.zeros(VOCAB, np.bool_)
    choices = [
        Choice(0, allowed=none),
        Choice(0, allowed=none, temperature=1.0),
        Choice(0, allowed=none, temperature=1.0, top_p=0.5),
        Choice(0, allowed=none, temperature=1.0, top_k=1000),
        Choice(0),
    ]

    out = LoneHead(logits, isa=best_isa(), threads=2).step(choices)

    np.testing.assert_array_equal(out.results["token"], [-1, -1, -1, -1, logits[0].argmax()])
    np.testing.assert_array_equal(out.results["status"], [1, 1, 1, 1, 0])


def test_more_rows_than_are_kept_whole_are_recomputed_and_choose_alike() -> None:
    logits = random_logits(2, 3000, spread=0.1)
    choices = [Choice(i % 2, temperature=1.0, top_p=0.9, seed=i, position=i) for i in range(150)]

    for threads in (1, 3):
        out = LoneHead(logits, isa=best_isa(), threads=threads).step(choices)
        want = [wanted(logits[choice.row], choice) for choice in choices]
        np.testing.assert_array_equal(out.results["token"], want)
