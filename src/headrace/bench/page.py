"""One self-contained HTML page: headings, paragraphs, tables and charts; no script, no font, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_STYLE: Final = """
:root{color-scheme:light}
body{margin:0;background:#fff;color:#111;font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px}
h2{font-size:19px;margin:36px 0 8px;border-bottom:1px solid #bbb;padding-bottom:3px}
p{max-width:72ch}
.sub{color:#444;margin:0 0 16px;max-width:none}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:10px;margin:16px 0;padding:0}
.tiles div{border:1px solid #bbb;border-radius:4px;padding:8px 12px}
.tiles dt{color:#444;font-size:13px}
.tiles dd{margin:0;font-size:21px;font-weight:600;overflow-wrap:anywhere}
.tiles dd span{display:block;font-size:13px;font-weight:400;color:#444}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:8px 0}
caption{text-align:left;color:#444;font-size:13px;padding-bottom:4px}
th,td{border-bottom:1px solid #ddd;padding:5px 12px 5px 0;text-align:right;vertical-align:top;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.words td,.words th{text-align:left;white-space:normal;overflow-wrap:anywhere}
.words th:first-child{white-space:nowrap;font-weight:600}
thead th{border-bottom:1px solid #444}
tbody th{font-weight:600}
small{display:block;color:#444;font-size:12px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:20px 28px}
figure{margin:0;break-inside:avoid}
figcaption{font-weight:600;margin-bottom:2px}
svg{width:100%;height:auto;display:block}
.notes{border-left:4px solid #111;padding:2px 0 2px 30px;margin:16px 0}
.notes li{margin:4px 0}
@media print{main{max-width:none;padding:0}}
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A table cell: the figure, and what stands small beneath it."""

    text: str
    small: str = ""


class Page:
    """Takes the parts of a page in their order.

    Args:
        title: of the page.
        subtitle: one line under it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="sub">{escape(subtitle)}</p>')

    def heading(self, text: str) -> None:
        """Begins a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Adds running text."""
        self._parts.append(f"<p>{escape(text)}</p>")

    def notes(self, notes: Sequence[str]) -> None:
        """Adds what people must not overlook."""
        if notes:
            self._parts.append(f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>')

    def tiles(self, tiles: Sequence[tuple[str, str, str]]) -> None:
        """Adds the few figures that matter most: name, figure, and what stands small beneath it."""
        cells = [
            f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}<span>{escape(small)}</span></dd></div>"
            for name, figure, small in tiles
        ]
        self._parts.append(f'<dl class="tiles">{"".join(cells)}</dl>')

    def table(
        self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[Cell | str]], *, is_words: bool = False
    ) -> None:
        """Adds a table; its first column heads the rows.

        Args:
            is_words: cells hold text that may break, not figures.
        """
        head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
        lines = []
        for row in rows:
            first, *others = (cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
            cells = "".join(f"<td>{_cell(cell)}</td>" for cell in others)
            lines.append(f'<tr><th scope="row">{_cell(first)}</th>{cells}</tr>')
        kind = ' class="words"' if is_words else ""
        self._parts.append(
            f'<div class="scroll"><table{kind}><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>"
        )

    def charts(self, charts: Sequence[tuple[str, str]]) -> None:
        """Adds charts side by side where there is room: caption and ``svg`` element."""
        figures = [f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" for caption, svg in charts]
        self._parts.append(f'<div class="charts">{"".join(figures)}</div>')

    def html(self) -> str:
        """Gives the whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head>\n"
            f"<body><main>\n{chr(10).join(self._parts)}\n</main></body></html>\n"
        )


def _cell(cell: Cell) -> str:
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    return f"{escape(cell.text)}{small}"
