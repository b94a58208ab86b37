import itertools
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from headrace.bench.plots import WIDTH, Axis, Mark, Series, line_chart

SVG = "{http://www.w3.org/2000/svg}"
Box = tuple[float, float, float, float]


def words(svg: str) -> list[tuple[str, Box]]:
    """Gives every text with the box it takes: left, top, right, bottom."""
    found = []
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        text = element.text or ""
        width = 6.5 * len(text)
        if "transform" in element.attrib:  # the y axis' label, upright
            found.append((text, (x - 9, y - width / 2, x + 3, y + width / 2)))
            continue
        left = {"start": x, "middle": x - width / 2, "end": x - width}[element.attrib["text-anchor"]]
        found.append((text, (left, y - 9, left + width, y + 3)))
    return found


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def random_points(random: np.random.Generator, num: int, low: float, high: float) -> list[tuple[float, float | None]]:
    xs = np.sort(np.exp(random.uniform(np.log(low), np.log(high), num)))
    ys = np.exp(random.uniform(np.log(low), np.log(high), num))
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


CASES = list(itertools.product([1, 2, 6], [1, 2, 300], [(1e-6, 1e-5), (0.5, 7.0), (3.0, 12345.0), (1e-3, 9e9)]))


@pytest.mark.parametrize("is_log", [False, True], ids=["linear", "log"])
def test_no_words_lie_on_others_or_outside(is_log: bool) -> None:
    random = np.random.default_rng(3)
    for num_series, num_points, (low, high) in CASES:
        series = [
            Series(f"a series of name {index}", random_points(random, num_points, low, high))
            for index in range(num_series)
        ]

        svg = line_chart("t", "d", series, Axis("seconds since the start", is_log), Axis("latency, ms", is_log))

        height = float(ElementTree.fromstring(svg).attrib["viewBox"].split()[3])
        found = words(svg)
        for (one, box), (other, second) in itertools.combinations(found, 2):
            assert not overlap(box, second), (one, other, num_series, num_points, low)
        for text, (left, top, right, bottom) in found:
            assert left >= 0 and right <= WIDTH and top >= 0 and bottom <= height, (text, left, right)  # noqa: PT018


def test_words_on_the_x_axis_are_left_out_before_they_touch() -> None:
    names = [f"0.{index}.0-rc{index}" for index in range(30)]
    series = [Series("p50", [(float(index), 1.0) for index in range(30)])]

    svg = line_chart("t", "d", series, Axis("version", tick_labels=names), Axis("ms"))

    shown = words(svg)
    assert not any(overlap(one, other) for (_, one), (_, other) in itertools.combinations(shown, 2))
    assert len([text for text, _ in shown if "rc" in text]) >= 4


def test_series_differ_without_colour() -> None:
    series = [Series(f"s{index}", [(0.0, 1.0), (1.0, float(index))]) for index in range(6)]

    svg = line_chart("t", "d", series, Axis("x"), Axis("y"))

    paths = re.findall(r'<path d="M[^"]*" stroke-linejoin="round" [^>]*>', svg)
    dashes = [match.group(1) if (match := re.search(r'dasharray="([^"]*)"', path)) else "" for path in paths]
    assert len(set(dashes)) == 6


def test_a_line_runs_through_its_points_and_breaks_where_there_are_none() -> None:
    points: list[tuple[float, float | None]] = [(0.0, 0.0), (5.0, 10.0), (6.0, None), (10.0, 5.0)]

    svg = line_chart("t", "d", [Series("s", points)], Axis("x"), Axis("y"))

    (line,) = re.findall(r'<path d="(M[^"]*)" stroke-linejoin', svg)
    moves = [(kind, float(x), float(y)) for kind, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", line)]
    (_, x0, y0), (_, x5, y10), (_, x10, y5) = moves
    assert [kind for kind, _, _ in moves] == ["M", "L", "M"]
    assert x5 - x0 == pytest.approx((x10 - x0) / 2, abs=0.1)
    assert y5 - y0 == pytest.approx((y10 - y0) / 2, abs=0.1)
    assert y10 < y0  # larger is higher


def test_logarithmic_axes_leave_out_what_they_cannot_show() -> None:
    svg = line_chart("t", "d", [Series("s", [(0.0, 1.0), (1.0, 0.0), (10.0, 5.0)])], Axis("x", True), Axis("y", True))

    (line,) = re.findall(r'<path d="(M[^"]*)" stroke-linejoin', svg)
    assert line.count("M") == 1
    assert "nan" not in svg.lower()


@pytest.mark.parametrize("points", [[], [(1.0, None)], [(float("nan"), 1.0)], [(1.0, float("inf"))]])
def test_nothing_measured_is_said(points: list[tuple[float, float | None]]) -> None:
    svg = line_chart("t", "d", [Series("s", points)], Axis("x"), Axis("y"), marks=[Mark(1.0, "knee")])

    assert "nothing was measured" in svg


def test_charts_speak_and_escape() -> None:
    svg = line_chart("a < b", "c & d", [Series("<s>", [(0.0, 1.0)]), Series("t", [(0.0, 1.0)])], Axis("x"), Axis("y"))

    root = ElementTree.fromstring(svg)
    assert root.attrib["role"] == "img"
    assert (root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")) == ("a < b", "c & d")
    assert "<s>" in [text for text, _ in words(svg)]
    assert unescape("&lt;s&gt;") == "<s>"


def test_a_point_without_neighbours_is_marked_however_many_others_there_are() -> None:
    points = [(float(index), None if index in (50, 52) else 1.0) for index in range(100)]

    svg = line_chart("t", "d", [Series("s", points)], Axis("x"), Axis("y"))

    assert svg.count("<circle") == 1
