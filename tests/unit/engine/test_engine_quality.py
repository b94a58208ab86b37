"""Quality measurement: the divergence by hand, and a tiny model against itself in other formats."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import ContextLengthError
from headrace.engine.quality import Distributions, Subject, compare, divergences
from headrace.testing.gates import Gate
from headrace.testing.golden import read_golden
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama


def distributions(*rows: dict[int, float]) -> Distributions:
    ids = np.array([sorted(row, key=lambda token: -row[token]) for row in rows], np.int32)
    probabilities = np.array([[row[token] for token in tokens] for row, tokens in zip(rows, ids.tolist(), strict=True)])
    return Distributions(ids, np.log(probabilities), np.log(probabilities[:, 0]))


def test_divergence_of_a_distribution_from_itself_is_zero() -> None:
    p = distributions({3: 0.5, 1: 0.25, 7: 0.125})

    assert divergences(p, p) == pytest.approx([0.0], abs=1e-12)


def test_divergence_counts_the_listed_tokens_and_one_remainder() -> None:
    p = distributions({3: 0.5, 1: 0.25})
    q = distributions({1: 0.5, 3: 0.25})

    wanted = 0.5 * np.log(2) - 0.25 * np.log(2)  # the remainders are equal
    assert divergences(p, q) == pytest.approx([wanted])


def test_divergence_joins_what_only_one_side_lists_with_the_remainder() -> None:
    p = distributions({3: 0.5, 1: 0.25})
    q = distributions({3: 0.4, 9: 0.35})

    wanted = 0.5 * np.log(0.5 / 0.4) + 0.5 * np.log(0.5 / 0.6)
    assert divergences(p, q) == pytest.approx([wanted])


def test_comparison_gives_agreement_and_perplexity() -> None:
    p = distributions({3: 0.5, 1: 0.25}, {2: 0.5, 4: 0.25})
    q = distributions({3: 0.5, 1: 0.25}, {4: 0.5, 2: 0.25})

    report = compare(p, q)

    assert (report.positions, report.top1_ratio) == (2, 0.5)
    assert report.kl_mean == pytest.approx(report.kl_max / 2)
    assert (report.perplexity, report.reference_perplexity) == (pytest.approx(2), pytest.approx(2))


def test_gate_names_every_limit_that_is_missed() -> None:
    report = compare(distributions({3: 0.9, 1: 0.05}), distributions({1: 0.9, 3: 0.05}))

    faults = Gate("x", "bf16", "bf16", "none", "golden", max_kl_mean=0.1, min_top1_ratio=0.9).faults(report)

    assert len(faults) == 2
    assert "limit is 0.1" in faults[0]
    assert "top-1 is 0.0000" in faults[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype="bf16")


TEXTS = [[int(token) for token in np.random.default_rng(seed).integers(0, 320, 90)] for seed in (1, 2)]


def test_scores_do_not_depend_on_the_rows_of_a_step(tiny: Path) -> None:
    long = Subject(tiny, dtype="fp32", rows=128).distributions(TEXTS)
    short = Subject(tiny, dtype="fp32", rows=33).distributions(TEXTS)

    assert long.ids.shape == (2 * 89, 256)
    np.testing.assert_array_equal(long.ids, short.ids)
    np.testing.assert_array_equal(long.logprobs, short.logprobs)
    np.testing.assert_array_equal(long.targets, short.targets)


def test_greedy_answers_do_not_depend_on_their_company(tiny: Path) -> None:
    subject = Subject(tiny, sequences=2)
    prompts = [TEXTS[0][:5], TEXTS[1][:40], TEXTS[0][7:8]]

    together = subject.greedy(prompts, 40)

    assert [len(answer) for answer in together] == [40, 40, 40]
    assert together == [subject.greedy([prompt], 40)[0] for prompt in prompts]


def test_greedy_answer_is_the_most_likely_token_of_every_position(tiny: Path) -> None:
    subject = Subject(tiny, dtype="fp32")
    (answer,) = subject.greedy([TEXTS[0][:10]], 30)

    scored = subject.distributions([[*TEXTS[0][:10], *answer]])

    assert scored.ids[9:, 0].tolist() == answer


@pytest.mark.parametrize(("dtype", "quantization", "limit"), [("bf16", "none", 1e-3), ("bf16", "int8", 5e-3)])
def test_narrow_formats_stay_near_the_exact_path(tiny: Path, dtype: str, quantization: str, limit: float) -> None:
    exact = Subject(tiny, dtype="fp32").distributions(TEXTS)

    report = compare(exact, Subject(tiny, dtype=dtype, quantization=quantization).distributions(TEXTS))

    # A random net of two layers: bf16 and eight bits disturb a logit of order 1 by a few thousandths.
    assert 0 < report.kl_mean < limit


def test_gguf_scores_like_the_safetensors_it_was_made_of(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "hf", dtype="f32")
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", matrix_type="F32", embedding_type="F32")

    report = compare(
        Subject(folder, dtype="fp32").distributions(TEXTS), Subject(gguf, dtype="fp32").distributions(TEXTS)
    )

    assert report.kl_mean < 1e-9


def test_text_longer_than_the_context_is_refused(tiny: Path) -> None:
    subject = Subject(tiny, context_tokens=64)

    with pytest.raises(ContextLengthError, match="90 tokens, the limit is 64"):
        subject.distributions(TEXTS)
    with pytest.raises(ContextLengthError, match="limit is 64"):
        subject.greedy([TEXTS[0][:60]], 10)


GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("name", ["bf16", "gguf"])
def test_golden_is_well_formed(name: str) -> None:
    golden = read_golden(GOLDEN / f"smollm2_{name}.npz")

    inputs = json.loads((GOLDEN / "inputs.json").read_text())
    assert (len(golden.prompts), golden.greedy_ids.shape) == (len(inputs["prompts"]), (20, 64))
    assert len(golden.reference.ids) == sum(len(text) - 1 for text in golden.texts)
    assert (np.diff(golden.reference.logprobs, axis=1) <= 0).all()
    assert (np.exp(golden.reference.logprobs).sum(axis=1) <= 1 + 1e-9).all()
    assert golden.greedy_margin.min() > 0


def test_goldens_stay_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 3 * 2**20
