import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.base.errors import MachineError, RequestError
from headrace.bench.markdown import render
from headrace.bench.report import write_reports
from headrace.bench.run_page import run_page
from headrace.bench.slo import parse_slo
from headrace.bench.summarize import summarize
from headrace.bench.summary import Summary, read_summary, schema
from headrace.bench.wording import duration, span

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "bench-report.schema.json"
NASTY = "<script>alert(1)</script> | & “quoted”"


@pytest.fixture
def summary(runs: Any) -> Summary:
    random = np.random.default_rng(1)
    exchanges = []
    for index in range(60):
        at = index * 0.5
        chunks = tuple((at + 0.2 + np.cumsum(random.exponential(0.02, 20))).tolist())
        exchanges.append(
            runs.exchange(
                index, scheduled_s=at, sent_s=at, first_s=chunks[0], chunk_s=chunks, ended_s=chunks[-1],
                output_tokens=20, output_tokens_counted=21,
            )
        )  # fmt: skip
    exchanges.append(runs.exchange(60, error="status", status=500, first_s=None, chunk_s=(), detail=NASTY))
    return summarize(runs.run(exchanges), parse_slo("ttft=500ms"))


def test_json_keeps_the_committed_schema_and_reads_back(summary: Summary, tmp_path: Path) -> None:
    write_reports(summary, tmp_path / "new" / "folder")

    path = tmp_path / "new" / "folder" / "report.json"
    committed = json.loads(REFERENCE.read_text())
    jsonschema.Draft202012Validator.check_schema(committed)
    jsonschema.validate(json.loads(path.read_bytes()), committed)
    assert committed == json.loads(json.dumps(schema()))
    assert read_summary(path) == summary


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"headrace_report": 99}', "has schema 99 of reports; this version reads 1"),
        (b"{}", "is no report"),
        (b'{"headrace_report": 1}', "is no report"),
    ],
)
def test_other_files_are_no_reports(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "r.json").write_bytes(content)

    with pytest.raises(RequestError, match=expected):
        read_summary(tmp_path / "r.json")


class Tags(HTMLParser):
    """Collects tags, and fails on one that is closed wrongly."""

    VOID = frozenset({"meta", "path", "circle", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(summary: Summary) -> None:
    html = run_page(summary)

    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.seen}
    assert not any({"src", "href", "onclick"} & set(attributes) for _, attributes in tags.seen)
    assert "url(" not in html
    assert "@import" not in html


def test_page_can_be_read_aloud(summary: Summary) -> None:
    tags = Tags()
    html = run_page(summary)
    tags.feed(html)

    tables = sum(tag == "table" for tag, _ in tags.seen)
    assert [attributes.get("lang") for tag, attributes in tags.seen if tag == "html"] == ["en"]
    assert sum(tag == "caption" for tag, _ in tags.seen) == tables > 3
    assert all(attributes.get("scope") for tag, attributes in tags.seen if tag == "th")
    assert len(re.findall(r'<svg [^>]*role="img"[^>]*><title>[^<]+</title><desc>[^<]+</desc>', html)) == html.count(
        "<svg"
    )


def test_what_a_server_says_is_shown_as_text(summary: Summary) -> None:
    html, markdown = run_page(summary), render(summary)

    assert "&lt;script&gt;alert(1)" in html
    assert "<script" not in html
    assert "alert(1)</script> \\| & “quoted” |" in markdown


def test_markdown_has_every_latency_with_its_interval(summary: Summary) -> None:
    text = render(summary)

    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        assert re.search(rf"\| {name} \| \S+ m?s \| ~?\S+ m?s \(\S+ ?m?s?\S* m?s\) \|", text), name
    assert "| goodput/s (ttft ≤ 500 ms) |" in text
    assert "Of 60 requests with both counts 60 differ; usage is -4.76% off the tokenizer." in text
    assert "| status 500 | 1 | 1.64% |" in text


def test_reports_without_any_answer_can_be_written(runs: Any, tmp_path: Path) -> None:
    failed = [runs.exchange(index, error="connect", first_s=None, chunk_s=(), status=None) for index in range(3)]

    write_reports(summarize(runs.run(failed)), tmp_path)
    write_reports(summarize(runs.run([])), tmp_path)

    assert "No request was measured." in (tmp_path / "report.html").read_text()


def test_a_folder_that_cannot_be_written_is_told(summary: Summary, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(MachineError, match="cannot be written"):
        write_reports(summary, tmp_path / "file" / "sub")


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [(0.0000123, "12 µs"), (0.00123, "1.23 ms"), (0.0412, "41.2 ms"), (0.412, "412 ms"), (0.9996, "1.00 s"),
     (15.24, "15.2 s"), (75.0, "1 min 15 s"), (0.0, "0 µs")],
)  # fmt: skip
def test_durations_have_three_digits(value_s: float, expected: str) -> None:
    assert duration(value_s) == expected


def test_intervals_name_a_common_unit_once() -> None:
    assert span(0.0401, 0.0427) == "40.1–42.7 ms"
    assert span(0.9, 1.2) == "900 ms–1.20 s"
