"""``bench quality`` on a tiny model: what is measured, what is refused, and when the answer is no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.errors import ConfigError, ModelTooLargeError, ModelUnsupportedError
from headrace.cli.main import make_app
from headrace.engine.quality_bench import QualityBench, quality_table, run_quality
from headrace.testing.tiny import write_tiny_gguf, write_tiny_llama
from headrace.testing.tiny_bert import write_tiny_bert

TEXT = "the cat sat on the mat and the dog ran " * 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), dtype="f32")


@pytest.fixture(scope="module")
def bench(tiny: Path) -> QualityBench:
    return run_quality(tiny, TEXT, text_name="cats", positions=200)


def test_every_quantisation_is_measured_against_the_exact_path(bench: QualityBench) -> None:
    none, int8, int4 = bench.measured

    assert bench.positions == 200
    assert (set(none.layouts), set(int8.layouts), set(int4.layouts)) == ({"BF16"}, {"Q8"}, {"Q4M", "Q8"})
    assert (none.bits, int8.layer_bits, int8.bits) == (16, 8.5, 8.5)
    assert 5 < int4.layer_bits < int4.bits < 8.5
    assert none.weight_bytes > int8.weight_bytes > int4.weight_bytes
    assert 0 < none.report.kl_mean < int8.report.kl_mean < int4.report.kl_mean
    assert none.report.reference_perplexity == bench.reference_perplexity > 1


def test_the_answer_is_no_when_one_is_over_the_limit(tiny: Path, bench: QualityBench) -> None:
    limit = bench.measured[1].report.kl_mean  # int8's: none is below it, int4 above

    again = run_quality(tiny, TEXT, text_name="cats", positions=200, max_kl=limit)

    assert [row.is_within(limit) for row in again.measured] == [True, True, False]
    assert not again.is_within
    assert [row[-1].split()[0] for row in quality_table(again)[1][1:]] == ["within", "within", "OVER"]


def test_what_gives_the_same_weights_is_measured_once(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", matrix_type="Q4_1")
    seen: list[str] = []

    bench = run_quality(
        path, TEXT, text_name="cats", positions=64, progress=lambda what, done, total: seen.append(what)
    )

    assert [row.same_as for row in bench.measured] == [None, "none", "none"]
    assert list(dict.fromkeys(seen)) == ["exact path", "none"]


def test_long_texts_are_read_in_windows_up_to_the_positions_wanted(tiny: Path) -> None:
    progress: list[tuple[int, int]] = []

    bench = run_quality(
        tiny,
        TEXT * 3,
        text_name="cats",
        quantizations=["none"],
        positions=1100,
        progress=lambda what, done, total: progress.append((done, total)),
    )

    assert bench.positions == 1100
    assert progress[:4] == [(0, 1100), (511, 1100), (1022, 1100), (1100, 1100)]


def test_a_text_too_short_to_say_anything_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="positions to compare, at least 16 are needed"):
        run_quality(tiny, "cat", text_name="short")


def test_a_model_whose_exact_path_does_not_fit_is_refused_with_the_arithmetic(tiny: Path) -> None:
    with pytest.raises(ModelTooLargeError, match=r"takes 51\d\.\d MiB \(four bytes a weight.*, 1\.0 MiB of memory are"):
        run_quality(tiny, TEXT, text_name="cats", available_bytes=2**20)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path / "bert")

    with pytest.raises(ModelUnsupportedError, match="is encoder-only; only models that predict next tokens do"):
        run_quality(tmp_path / "bert", TEXT, text_name="cats")


def test_the_command_prints_json_and_says_no_with_its_exit_code(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cats.txt").write_text(TEXT)
    common = ["bench", "quality", str(tiny), "--text", str(tmp_path / "cats.txt"), "--positions", "64"]

    good = CliRunner().invoke(make_app(), [*common, "--quantization", "int8", "--json"])
    bad = CliRunner().invoke(make_app(), [*common, "--quantization", "int4, none", "--max-kl", "0"])

    found = json.loads(good.stdout)
    assert good.exit_code == 0
    assert [row["quantization"] for row in found["measured"]] == ["int8"]
    assert (found["text"], found["positions"], found["is_within"]) == ("cats.txt", 64, True)
    assert bad.exit_code == 1
    assert "OVER 0" in bad.stdout
    assert "measuring int4: 64 positions" in bad.stderr


@pytest.mark.parametrize("wanted", ["int2", "", "none,,int9"])
def test_an_unknown_quantisation_is_a_usage_error(tiny: Path, wanted: str) -> None:
    with pytest.raises(ConfigError, match="give none, int8, int4, or several"):
        CliRunner().invoke(
            make_app(), ["bench", "quality", str(tiny), "--quantization", wanted], catch_exceptions=False
        )
