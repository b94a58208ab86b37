"""A load run while it goes on: a bar, figures and a small chart on a terminal; a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.table import Table

    from headrace.bench.load import ProgressSink, Snapshot

_BARS: Final = " ▁▂▃▄▅▆▇█"
_SECOND_S: Final = 1.0
_LINE_EVERY_S: Final = 10.0
_CHART_WIDTH: Final = 40  # beside words on a terminal of 80


@contextmanager
def show_run() -> Iterator[ProgressSink]:
    """Gives what a run tells its progress to; all of it goes to stderr."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        screen = Screen()

        def update(snapshot: Snapshot) -> None:
            screen.add(snapshot)
            live.update(screen.render())

        yield update


class Screen:
    """The picture of a run: what has come so far, second by second."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_CHART_WIDTH)
        self._ttfts_s: deque[float | None] = deque(maxlen=_CHART_WIDTH)
        self._latest_s: list[float] = []
        self._last: Snapshot | None = None
        self._mark: Snapshot | None = None

    def add(self, snapshot: Snapshot) -> None:
        """Takes the next snapshot."""
        self._last = snapshot
        self._latest_s += [ttft_s for ttft_s, _ in snapshot.latest_s]
        if self._mark is None:
            self._mark = snapshot
        elif (over_s := snapshot.elapsed_s - self._mark.elapsed_s) >= _SECOND_S:
            self._rates.append((snapshot.num_ended - self._mark.num_ended) / over_s)
            self._ttfts_s.append(_median(self._latest_s))
            self._latest_s = []
            self._mark = snapshot

    def render(self) -> Table:
        """Gives the picture."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from headrace.base.units import format_duration

        snapshot = self._last
        assert snapshot is not None, "only rendered with one"
        grid = Table.grid(padding=(0, 2))
        share = done_ratio(snapshot)
        bar = ProgressBar(total=1.0, completed=share, width=_CHART_WIDTH) if share is not None else Text("running")
        grid.add_row(Text("progress"), bar, Text(f"{format_duration(snapshot.elapsed_s)}"))
        total = f" of {snapshot.num_total:,}" if snapshot.num_total is not None else ""
        grid.add_row(
            Text("requests"),
            Text(f"{snapshot.num_ended:,}{total} answered, {snapshot.num_in_flight:,} under way"),
            Text(f"{snapshot.num_failed:,} failed", style="bold red" if snapshot.num_failed else ""),
        )
        last_rate = f"{self._rates[-1]:,.1f} a second" if self._rates else ""
        grid.add_row(Text("rate"), Text(chart(self._rates)), Text(last_rate))
        ttft_s = next((value for value in reversed(self._ttfts_s) if value is not None), None)
        grid.add_row(
            Text("TTFT"),
            Text(chart(self._ttfts_s)),
            Text("" if ttft_s is None else f"{format_duration(ttft_s)} median"),
        )
        if snapshot.elapsed_s > 0 and snapshot.num_chunks:
            grid.add_row(Text("chunks"), Text(f"{snapshot.num_chunks / snapshot.elapsed_s:,.0f} a second"), Text(""))
        return grid


def chart(values: Sequence[float | None] | deque[float] | deque[float | None]) -> str:
    """Gives a row of bars, one per value, the highest full; a blank where there is none."""
    top = max((value for value in values if value is not None), default=0.0)
    if top <= 0:
        return " " * len(values)
    steps = len(_BARS) - 1
    return "".join(" " if value is None else _BARS[max(1, round(steps * value / top))] for value in values)


def done_ratio(snapshot: Snapshot) -> float | None:
    """Gives how much is done, in [0, 1]: by requests or by time, whichever is further; None without a limit."""
    shares = []
    if snapshot.num_total:
        shares.append(snapshot.num_ended / snapshot.num_total)
    if snapshot.total_s:
        shares.append(snapshot.elapsed_s / snapshot.total_s)
    return min(1.0, max(shares)) if shares else None


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


class _Lines:
    """Progress for logs: a line every ten seconds."""

    def __init__(self) -> None:
        self._next_s = time.monotonic() + _LINE_EVERY_S

    def __call__(self, snapshot: Snapshot) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s += _LINE_EVERY_S
        share = done_ratio(snapshot)
        done = f"{100 * share:.0f} %, " if share is not None else ""
        sys.stderr.write(
            f"{snapshot.elapsed_s:.0f} s: {done}{snapshot.num_ended:,} answered, {snapshot.num_failed:,} failed, "
            f"{snapshot.num_in_flight:,} under way\n"
        )
