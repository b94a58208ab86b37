"""What stands on encoders, against transformers: classes of texts and of tokens, and tokens behind masks.

Tiny random models of every family on the exact path (scripts/head-goldens).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.engine.encode_executor import likeliest
from headrace.engine.validate import MAX_MARKS
from headrace.program.families.encoder_heads import TOKEN_SCORES, VECTORS
from headrace.program.spec import build_program, spec_from_files
from headrace.program.verify_lowered import verify_encoded
from headrace.protocol.frames import Encode, EncodeForm, pack_ids
from headrace.registry.model import open_model
from headrace.testing.encoder import encoded, encoded_masks, encoded_rows, results_of
from headrace.testing.tiny_families import ENCODER_LENGTHS, HEADED, MARKS, text, write_tiny_family

GOLDENS = np.load(Path(__file__).parents[1] / "golden" / "heads.npz")
BOUND = 1e-4
TEXTS = [text()[:length] for length in ENCODER_LENGTHS]
OF_TEXTS = [case for case in HEADED if case.endswith("ForSequenceClassification")]
OF_TOKENS = [case for case in HEADED if case.endswith("ForTokenClassification")]
MASKED = [case for case in HEADED if case.endswith("ForMaskedLM")]


def relative_error(case: str, found: np.ndarray) -> float:
    golden = GOLDENS[case]
    return float(np.abs(found - golden).max() / np.sqrt((golden**2).mean()))


@pytest.mark.parametrize("case", OF_TEXTS)
def test_classes_of_texts_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)

    assert relative_error(case, encoded(folder, TEXTS)) <= BOUND


@pytest.mark.parametrize("case", OF_TOKENS)
def test_classes_of_tokens_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)

    found = encoded_rows(folder, TEXTS)

    assert relative_error(case, found[1]) <= BOUND
    np.testing.assert_array_equal(encoded_rows(folder, [TEXTS[1]])[0], found[1])


@pytest.mark.parametrize("case", MASKED)
def test_tokens_behind_masks_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = write_tiny_family(tmp_path / case, case)
    vocab_size = GOLDENS[case].shape[1]

    _, found, _ = encoded_masks(folder, TEXTS, [[0], list(MARKS), [3]], vocab_size)

    expected = likeliest(GOLDENS[case], vocab_size)
    shares = np.zeros_like(GOLDENS[case])
    np.put_along_axis(shares, found[:, :, 0].astype(int), found[:, :, 1], axis=1)
    golden = np.zeros_like(shares)
    np.put_along_axis(golden, expected[:, :, 0].astype(int), expected[:, :, 1], axis=1)
    # Logarithms of shares differ as the scores do.
    scale = np.sqrt((GOLDENS[case] ** 2).mean())
    assert np.abs(np.log(shares) - np.log(golden)).max() / scale <= 2 * BOUND
    np.testing.assert_array_equal(found[:, 0, 0], expected[:, 0, 0])


@pytest.mark.parametrize("case", ["bert", "roberta", "xlm_roberta", "distilbert", "albert", "modernbert"])
def test_a_masked_head_changes_no_vector_and_rows_pool_to_it(tmp_path: Path, case: str) -> None:
    headed = write_tiny_family(tmp_path / "headed", f"{case}_ForMaskedLM")
    pooled = encoded(headed, TEXTS)

    rows = encoded_rows(headed, TEXTS)

    spec = spec_from_files(open_model(headed))
    for vector, found in zip(pooled, rows, strict=True):
        row = found[0] if spec.pooling == 0 else found.mean(axis=0)
        assert np.abs(row / np.linalg.norm(row) - vector).max() <= 1e-5
    assert spec.has_masked_head
    assert VECTORS in {buffer.name for buffer in build_program(spec).buffers}


def test_one_step_may_hold_every_form(tmp_path: Path) -> None:
    folder = write_tiny_family(tmp_path / "bert", "bert_ForMaskedLM")
    ids = [pack_ids(TEXTS[1])]
    alone = [
        results_of(folder, request)[0]
        for request in (
            Encode("r", ids),
            Encode("r", ids, form=EncodeForm.ROWS),
            Encode("r", ids, form=EncodeForm.MASKED, marks=[[5, 9]], num_top=3),
        )
    ]

    together = _in_one_step(folder, ids)

    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def _in_one_step(folder: Path, ids: list[bytes]) -> list[np.ndarray]:
    from headrace.base.clock import SystemClock
    from headrace.engine.encode_scheduler import EncodeScheduler
    from headrace.engine.loader import inspect, load
    from headrace.protocol.frames import Encoded
    from headrace.protocol.launch import WorkerLaunch

    inspection = inspect(WorkerLaunch(str(folder), "encoder", socket_fd=-1, threads=2, dtype="fp32"))
    assert inspection.encode_config is not None
    scheduler = EncodeScheduler(inspection.encode_config)
    scheduler.submit(0, Encode("a", ids), 0.0)
    scheduler.submit(1, Encode("b", ids, form=EncodeForm.ROWS), 0.0)
    scheduler.submit(2, Encode("c", ids, form=EncodeForm.MASKED, marks=[[5, 9]], num_top=3), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.items) == 3
    scheduler.complete(plan, load(inspection, SystemClock()).executor.run(plan), 0.0)
    events = scheduler.take_events()
    return [
        np.frombuffer(event.vector, "<f4")
        for owner in range(3)
        for event in events[owner]
        if isinstance(event, Encoded)
    ]


def test_more_marks_than_a_step_holds_are_told_as_alone(tmp_path: Path) -> None:
    folder = write_tiny_family(tmp_path / "bert", "bert_ForMaskedLM")
    texts = [TEXTS[1]] * 5
    marks = [
        [at % len(TEXTS[1]) for at in range(first, first + count)] for first, count in enumerate((20, 30, 1, 24, 9))
    ]
    assert sum(map(len, marks)) > MAX_MARKS

    together = encoded_masks(folder, texts, marks, 2)

    for found, own in zip(together, marks, strict=True):
        np.testing.assert_array_equal(found, encoded_masks(folder, texts[:1], [own], 2)[0])


@pytest.mark.parametrize("rows", [512, 8192])
def test_scores_of_the_vocabulary_are_reserved_for_marks_alone(tmp_path: Path, rows: int) -> None:
    from headrace.engine.loader import inspect
    from headrace.protocol.launch import WorkerLaunch

    folder = write_tiny_family(tmp_path / "bert", "bert_ForMaskedLM")

    inspection = inspect(WorkerLaunch(str(folder), "encoder", socket_fd=-1, max_step_tokens=rows))

    buffer = inspection.encoded.buffer(TOKEN_SCORES)
    vectors = inspection.encoded.buffer(VECTORS)
    assert buffer.size_bytes == -(-MAX_MARKS * inspection.spec.vocab_size * 4 // 64) * 64
    assert vectors.size_bytes == rows // 8 * inspection.spec.width * 4  # texts of 8 tokens may fill a step
    verify_encoded(inspection.program, inspection.encoded)


def test_files_without_the_heads_weights_are_an_embedding_model(tmp_path: Path) -> None:
    folder = write_tiny_family(tmp_path / "bert", "bert")
    config = (folder / "config.json").read_text().replace("BertModel", "BertForMaskedLM")
    (folder / "config.json").write_text(config)

    assert not spec_from_files(open_model(folder)).has_masked_head


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (Encode("r", [pack_ids([1, 2])], form=EncodeForm.MASKED, marks=[[0]], num_top=0), "num_top is 0"),
        (Encode("r", [pack_ids([1, 2])], form=EncodeForm.MASKED, marks=[], num_top=1), "marks is 0"),
        (Encode("r", [pack_ids([1, 2])], form=EncodeForm.MASKED, marks=[[2]], num_top=1), "marks is 2"),
        (Encode("r", [pack_ids([1, 2])], form=EncodeForm.MASKED, marks=[[]], num_top=1), "marks is 0"),
    ],
)
def test_wrong_marks_are_refused_by_name(tmp_path: Path, request_: Encode, word: str) -> None:
    from headrace.base.errors import RequestError
    from headrace.engine.validate import check_encode

    with pytest.raises(RequestError, match=word):
        check_encode(request_, vocab_size=9, context_tokens=8, width=4, forms=tuple(EncodeForm))
    with pytest.raises(RequestError, match="this model has 'pooled'"):
        check_encode(request_, vocab_size=9, context_tokens=8, width=4, forms=(EncodeForm.POOLED,))
