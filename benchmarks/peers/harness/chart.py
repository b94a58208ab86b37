"""The results as a picture: one bar an engine and cell, as a share of ours, drawn as plain SVG."""

from __future__ import annotations

from html import escape

from harness.cells import CELLS, SUITES, TITLES
from harness.engines import OURS
from harness.markdown import number
from harness.results import Results
from harness.table import GOAL_RATIO, Row, rows

WIDTH, LABEL, BAR, GAP, TITLE = 900, 260, 14, 4, 26
SCALE = 460
"""Pixels of a bar as long as ours."""
PEERS_A_CELL = 3
OURS_COLOUR, PEER_COLOUR, GOAL_COLOUR = "#1f6f8b", "#b8bfc6", "#c8553d"


def chart(results: Results, suite: str) -> str:
    """Returns the picture: in each cell ours and its best peers, longer is better, the goal as a line."""
    parts: list[str] = []
    y = 34
    for model in SUITES[suite]:
        if not any(sample.model == model for sample in results.samples):
            continue
        parts.append(_text(8, y + 14, TITLES[model], size=15, weight="bold"))
        y += TITLE
        for cell in CELLS[model]:
            table = rows(results, model, cell)
            ours = next((row for row in table if row.engine == OURS and row.median), None)
            peers = [row for row in table if row.engine != OURS and row.median and row.ratio][:PEERS_A_CELL]
            if ours is None or not peers:
                continue
            parts.append(_text(8, y + BAR - 2, f"{cell.name}, {cell.unit}", size=12, weight="bold"))
            for row in (ours, *peers):
                share = 1.0 if row is ours else 1 / (row.ratio or 1.0)
                parts += _bar(y, row, share, f"{row.engine} {row.format}", number(row.median or 0.0, cell))
                y += BAR + GAP
            goal = LABEL + SCALE / GOAL_RATIO
            top = y - (BAR + GAP) * (1 + len(peers))
            parts.append(f'<line x1="{goal:.0f}" y1="{top}" x2="{goal:.0f}" y2="{y - GAP}" stroke="{GOAL_COLOUR}"/>')
            y += 10
        y += 10
    head = _text(8, 20, f"Longer is better; ours is 100 %. A peer left of the line is {GOAL_RATIO} × behind.", size=12)
    body = "\n".join([f'<rect width="{WIDTH}" height="{y}" fill="white"/>', head, *parts])
    size = f'width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


def _bar(y: int, row: Row, share: float, label: str, value: str) -> list[str]:
    colour = OURS_COLOUR if row.engine == OURS else PEER_COLOUR
    length = max(2, min(share * SCALE, WIDTH - LABEL - 60))
    bar = f'<rect x="{LABEL}" y="{y}" width="{length:.0f}" height="{BAR}" fill="{colour}"/>'
    right = _text(int(LABEL + length + 6), y + BAR - 3, value, size=11)
    return [_text(LABEL - 6, y + BAR - 3, label, size=11, anchor="end"), bar, right]


def _text(x: int, y: int, text: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
