"""Line charts as inline SVG: readable in black and white, without scripts, fonts or network.

Series differ by dashes and marks as well as by colour. The legend stands above the plot and its height is worked out
first, so nothing lies on top of anything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 560
_PLOT_HEIGHT: Final = 200
_LEFT, _RIGHT, _BOTTOM, _TOP = 72, 18, 52, 14
_LEGEND_ROW: Final = 20
_CHAR: Final = 6.9  # px of 12 px sans-serif text, a little more than its widest common faces have
_MARKED_POINTS: Final = 40
_COLOURS: Final = ("#0b4a8f", "#b3470e", "#2f6b2f", "#6a3d9a", "#333333", "#8a6d00")
_DASHES: Final = ("", "7 4", "2 3", "10 3 2 3", "14 4", "4 2 1 2")


@dataclass(frozen=True, slots=True)
class Series:
    """A line.

    Args:
        points: x and y; a y of None breaks the line.
        is_steps: y holds until the next x.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    is_steps: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at ``x`` with a word to it."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Args:
        label: what it shows, with its unit.
        is_log: decades; values ≤ 0 are left out.
        from_zero: a linear axis begins at 0.
        start, stop: a linear axis begins and ends there at least.
        tick_labels: words in place of numbers, for x = 0, 1, 2, …
    """

    label: str
    is_log: bool = False
    from_zero: bool = True
    start: float | None = None
    stop: float | None = None
    tick_labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start_px: float
    stop_px: float
    is_log: bool

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        at = math.log10(value) if self.is_log else value
        return self.start_px + (at - low) / (high - low) * (self.stop_px - self.start_px)


def line_chart(
    title: str, description: str, series: Sequence[Series], x: Axis, y: Axis, *, marks: Sequence[Mark] = ()
) -> str:
    """Draws lines.

    Args:
        title: what the chart shows; read out where it cannot be seen.
        description: what to see in it, in a sentence.

    Returns:
        An ``svg`` element; one that says "nothing was measured" where no series has a point.
    """
    shown = [Series(line.name, _usable(line, x, y), line.is_steps) for line in series]
    shown = [line for line in shown if any(value is not None for _, value in line.points)]
    legend, legend_height = _legend([line.name for line in shown])
    top = _TOP + legend_height
    height = top + _PLOT_HEIGHT + _BOTTOM
    if not shown:
        body = [_text(WIDTH / 2, top + _PLOT_HEIGHT / 2, "nothing was measured", "middle")]
        return _frame(title, description, height, body)
    xs = [at for line in shown for at, _ in line.points]
    ys = [value for line in shown for _, value in line.points if value is not None]
    x_ticks, x_scale = _scale([*xs, *(mark.x for mark in marks)], x, _LEFT, WIDTH - _RIGHT, 7, is_tight=True)
    y_ticks, y_scale = _scale(ys, y, top + _PLOT_HEIGHT, top, 5, is_tight=False)
    body = [
        *legend,
        *_grid(x_ticks, y_ticks, x_scale, y_scale, x, top),
        *_axis_labels(x.label, y.label, top),
        *_marks(marks, x_scale, top),
    ]
    for index, line in enumerate(shown):
        body += _line(line, index, x_scale, y_scale)
    return _frame(title, description, height, body)


def _usable(line: Series, x: Axis, y: Axis) -> list[tuple[float, float | None]]:
    found: list[tuple[float, float | None]] = []
    for at, value in line.points:
        if math.isfinite(at) and not (x.is_log and at <= 0):
            is_drawn = value is not None and math.isfinite(value) and not (y.is_log and value <= 0)
            found.append((at, value if is_drawn else None))
    return found


def _frame(title: str, description: str, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:g}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#111">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _style(index: int) -> str:
    kind = index % len(_COLOURS)
    dash = f' stroke-dasharray="{_DASHES[kind]}"' if _DASHES[kind] else ""
    return f'fill="none" stroke="{_COLOURS[kind]}" stroke-width="1.8"{dash}'


def _legend(names: Sequence[str]) -> tuple[list[str], float]:
    if len(names) < 2:
        return [], 0.0
    body: list[str] = []
    at, row = float(_LEFT), 0
    for index, name in enumerate(names):
        width = 34 + len(name) * _CHAR + 18
        if at + width > WIDTH and at > _LEFT:
            at, row = float(_LEFT), row + 1
        middle = _TOP + row * _LEGEND_ROW
        body.append(f'<path d="M{at:.1f} {middle}h28" {_style(index)}/>')
        body.append(_marker(index, at + 14, middle))
        body.append(_text(at + 34, middle + 4, name, "start"))
        at += width
    return body, (row + 1) * _LEGEND_ROW


def _scale(
    values: Sequence[float], axis: Axis, start_px: float, stop_px: float, num_ticks: int, *, is_tight: bool
) -> tuple[list[float], _Scale]:
    if axis.tick_labels:
        last = len(axis.tick_labels) - 1
        every = max(1, math.ceil(len(axis.tick_labels) / num_ticks))
        spare = 0.5 if last == 0 else 0.0
        return [float(at) for at in range(0, last + 1, every)], _Scale(-spare, last + spare, start_px, stop_px, False)
    low, high = min(values), max(values)
    if axis.is_log:
        return _log_scale(low, high, start_px, stop_px)
    low = min(0.0, low) if axis.from_zero else low
    low = low if axis.start is None else min(low, axis.start)
    high = high if axis.stop is None else max(high, axis.stop)
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _nice_step((high - low) / num_ticks)
    whole = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    ticks = [index * step for index in whole]
    if is_tight:  # time and load: no empty stretch at the right
        ticks = [tick for tick in ticks if low - 1e-9 * step <= tick <= high + 1e-9 * step]
        return ticks, _Scale(low, high, start_px, stop_px, False)
    return ticks, _Scale(ticks[0], ticks[-1], start_px, stop_px, False)


def _nice_step(step: float) -> float:
    decade = 10.0 ** math.floor(math.log10(step))
    return next(factor * decade for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * decade >= step * (1 - 1e-9))


def _log_scale(low: float, high: float, start_px: float, stop_px: float) -> tuple[list[float], _Scale]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = max(1, math.ceil((last - first) / 8))
    candidates = [factor * 10.0**exponent for exponent in range(first, last + 1, every) for factor in factors]
    below = [tick for tick in candidates if tick <= low * (1 + 1e-9)]
    above = [tick for tick in candidates if tick >= high * (1 - 1e-9)]
    start, stop = (below or candidates)[-1 if below else 0], (above or candidates)[0 if above else -1]
    if stop <= start:
        stop = start * 10
    return [tick for tick in candidates if start <= tick <= stop], _Scale(start, stop, start_px, stop_px, True)


def _grid(
    x_ticks: Sequence[float], y_ticks: Sequence[float], x_scale: _Scale, y_scale: _Scale, x: Axis, top: float
) -> list[str]:
    bottom = top + _PLOT_HEIGHT
    body = []
    for tick in y_ticks:
        at = y_scale(tick)
        body.append(f'<path d="M{_LEFT} {at:.1f}H{WIDTH - _RIGHT}" stroke="#ddd"/>')
        body.append(_text(_LEFT - 8, at + 4, number(tick), "end"))
    taken_px = -math.inf
    for tick in x_ticks:
        at = x_scale(tick)
        body.append(f'<path d="M{at:.1f} {bottom}v5" stroke="#444"/>')
        word = x.tick_labels[round(tick)] if x.tick_labels else number(tick)
        half = len(word) * _CHAR / 2
        middle = min(at, WIDTH - half)
        if middle - half >= taken_px:  # a label that would touch its neighbour is left out
            body.append(_text(middle, bottom + 19, word, "middle"))
            taken_px = middle + half + 6
    body.append(f'<path d="M{_LEFT} {top}V{bottom}H{WIDTH - _RIGHT}" fill="none" stroke="#444"/>')
    return body


def _axis_labels(x_label: str, y_label: str, top: float) -> list[str]:
    middle = top + _PLOT_HEIGHT / 2
    return [
        _text((_LEFT + WIDTH - _RIGHT) / 2, top + _PLOT_HEIGHT + 42, x_label, "middle"),
        _text(12, middle, y_label, "middle", f' transform="rotate(-90 12 {middle:.1f})"'),
    ]


def _marks(marks: Sequence[Mark], x_scale: _Scale, top: float) -> list[str]:
    body = []
    for row, mark in enumerate(sorted(marks, key=lambda mark: mark.x)):
        at = x_scale(mark.x)
        is_right = at > (_LEFT + WIDTH) / 2
        body.append(f'<path d="M{at:.1f} {top}v{_PLOT_HEIGHT}" stroke="#444" stroke-dasharray="3 3"/>')
        # White behind the words, as lines may run under them; each mark has a line of its own.
        halo = ' stroke="#fff" stroke-width="4" paint-order="stroke"'
        body.append(
            _text(at + (-6 if is_right else 6), top + 14 + 16 * row, mark.text, "end" if is_right else "start", halo)
        )
    return body


def _line(line: Series, index: int, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    path: list[str] = []
    dots: list[tuple[float, float]] = []
    alone: list[tuple[float, float]] = []  # a point without neighbours would leave no stroke
    is_down = False
    values = [None, *(value for _, value in line.points), None]
    for place, (at, value) in enumerate(line.points):
        if value is None:
            is_down = False
            continue
        px, py = x_scale(at), y_scale(value)
        if is_down and line.is_steps:
            path.append(f"H{px:.1f}V{py:.1f}")
        else:
            path.append(f"{'L' if is_down else 'M'}{px:.1f} {py:.1f}")
        dots.append((px, py))
        if values[place] is None and values[place + 2] is None:
            alone.append((px, py))
        is_down = True
    body = [f'<path d="{"".join(path)}" stroke-linejoin="round" {_style(index)}/>']
    return body + [_marker(index, px, py) for px, py in (dots if len(dots) <= _MARKED_POINTS else alone)]


def _marker(index: int, x: float, y: float) -> str:
    paint = f'fill="#fff" stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.6"'
    match index % 4:
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" {paint}/>'
        case 1:
            return f'<rect x="{x - 3.2:.1f}" y="{y - 3.2:.1f}" width="6.4" height="6.4" {paint}/>'
        case 2:
            return f'<path d="M{x:.1f} {y - 4.2:.1f}l4 7.4h-8z" {paint}/>'
        case _:
            return f'<path d="M{x:.1f} {y - 4.4:.1f}l4.4 4.4l-4.4 4.4l-4.4 -4.4z" {paint}/>'


def number(value: float) -> str:
    """Gives a number as people write it: ``0.25``, ``1,500``, ``2.5M``."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value else "0"
