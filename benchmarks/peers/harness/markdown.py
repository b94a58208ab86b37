"""The results as Markdown: the summary of every model, then every engine in every cell, then how it was measured."""

from __future__ import annotations

from collections.abc import Callable

from harness.cells import CELLS, LARGE, SMALL, SUITES, TITLES, Cell
from harness.engines import OURS
from harness.results import Limit, Quality, Results, Session
from harness.table import (
    GOAL_RATIO,
    GOAL_SHARE,
    SAME_BITS,
    Row,
    Verdict,
    boundary_of,
    mode_of,
    op_by_op,
    rows,
    verdicts,
)


def number(value: float, cell: Cell) -> str:
    """Returns a figure with as many digits as mean something."""
    return f"{value:,.2f}" if cell.unit == "s" or value < 10 else f"{value:,.0f}"


def quality_words(quality: Quality | None, model: str) -> str:
    """Returns KL and top-1, or the least cosine."""
    if quality is None:
        return "as on SmolLM2" if model == LARGE else "–"
    if quality.kl_mean is not None and quality.top1_ratio is not None:
        return f"{quality.kl_mean:.1e}, {quality.top1_ratio:.1%}{'*' if quality.what else ''}"
    return f"{quality.cosine_min:.5f}"


def summary(results: Results, model: str) -> str:
    """Returns the table of a model's cells."""
    lines = [
        "| cell | unit | ours | format | limit | share | best peer of our bits or more | ours ÷ it "
        "| best peer of any bits | ours ÷ it | goal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found in verdicts(results, model):
        cell = found.cell
        limit = "–" if found.limit is None else number(found.limit, cell)
        share = "–" if found.share is None else f"{found.share:.0%}"
        ours = number(found.ours.median or 0.0, cell)
        peers = " | ".join(f"{_named(row, cell)} | {_times(row)}" for row in (found.peer, found.any_peer))
        head = f"| {cell.name} | {cell.unit} | {ours} | {found.ours.format} | {limit} | {share} |"
        lines.append(f"{head} {peers} | {found.words if found.limit or found.peer else '–'} |")
    return "\n".join(lines)


def _named(row: Row | None, cell: Cell) -> str:
    return "–" if row is None else f"{row.engine} {row.format}: {number(row.median or 0.0, cell)}"


def _times(row: Row | None) -> str:
    return "–" if row is None or row.ratio is None else f"{row.ratio:.2f}"


def details(results: Results, model: str) -> str:
    """Returns the table of every engine and format in every cell."""
    what = "least cosine" if model not in (SMALL, LARGE) else "KL, top-1"
    lines = [f"| cell | engine | format | bits | {what} | median | range | rounds | ours ÷ this |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for cell in CELLS[model]:
        for row in rows(results, model, cell):
            judged = quality_words(row.quality or _of_small(results, row), model)
            head = f"| {cell.name} | {row.engine} | {row.format} | {row.bits:.1f} | {judged} |"
            if row.median is None:
                lines.append(f"{head} {_brief(row.error)} | | 0 | |")
                continue
            spread = f"{number(min(row.values), cell)}–{number(max(row.values), cell)}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            lines.append(f"{head} {number(row.median, cell)} | {spread} | {len(row.values)} | {ratio} |")
    return "\n".join(lines)


def _of_small(results: Results, row: Row) -> Quality | None:
    """The random model says nothing about quality: its formats are judged on the small one."""
    keys = ((found, (found.model, found.engine, found.format)) for found in results.quality)
    return next((found for found, key in keys if key == (SMALL, row.engine, row.format)), None)


def _brief(error: str) -> str:
    line = error.strip().splitlines()[-1] if error.strip() else "not measured"
    return f"failed: {line[:100]}".replace("|", "/")


def modes(results: Results, model: str) -> str:
    """Returns what ours and the best peer reach in each bandwidth mode, where the machine showed two."""
    samples = [sample for sample in results.samples if sample.model == model and sample.value]
    boundary = boundary_of(samples)
    if not samples:
        return ""
    low, high = (f(sample.bandwidth for sample in samples) / 1e9 for f in (min, max))
    if boundary is None:
        return f"The memory stayed in one mode: {low:.0f} to {high:.0f} GB/s."
    lines = [
        f"The memory read {low:.0f} to {high:.0f} GB/s; far is {boundary / 1e9:.0f} GB/s or more. Ratios stand within "
        "a round, whatever its mode.",
        "",
        "| cell | engine | near: rounds, median | far: rounds, median |",
        "|---|---|---|---|",
    ]
    for verdict in verdicts(results, model):
        pair = (verdict.ours, verdict.peer)
        lines += [_mode_line(results, model, verdict, row, boundary) for row in pair if row is not None]
    return "\n".join(lines)


def _mode_line(results: Results, model: str, verdict: Verdict, row: Row, boundary: float) -> str:
    key = (model, verdict.cell.name, row.engine, row.format)
    words = []
    for mode in ("near", "far"):
        values = sorted(
            sample.value
            for sample in results.samples
            if (sample.model, sample.cell, sample.engine, sample.format) == key
            and sample.value
            and mode_of(sample, boundary) == mode
        )
        middle = number(values[len(values) // 2], verdict.cell) if values else "–"
        words.append(f"{len(values)}, {middle}")
    return f"| {verdict.cell.name} | {row.engine} {row.format} | {' | '.join(words)} |"


def roofline(results: Results, model: str) -> str:
    """Returns in words what limits each cell, at the rates that the last session probed."""
    last: dict[tuple[str, str], Limit] = {
        (limit.format, limit.cell): limit for limit in results.limits if limit.model == model
    }
    if not last:
        return ""
    lines = []
    for verdict in verdicts(results, model):
        limit = last.get((verdict.ours.format, verdict.cell.name))
        if limit is not None:
            lines.append(
                f"- {verdict.cell.name}: at {limit.bandwidth / 1e9:.0f} GB/s and {limit.peak / 1e9:,.0f} Gop/s "
                f"({limit.arithmetic}) at most {number(limit.value, verdict.cell)} {verdict.cell.unit}; ours is at "
                f"{verdict.share:.0%}."
            )
    return "\n".join(lines)


def arm(results: Results, model: str) -> str:
    """Returns the op-by-op arm beside llama.cpp; empty where it was not measured."""
    found = op_by_op(results, model)
    if not found:
        return ""
    lines = ["| cell | op by op | beside llama.cpp of our bits or more | beside its best format |", "|---|---|---|---|"]
    for cell, row, peers in found:
        same = [peer for peer in peers if peer.bits > row.bits - SAME_BITS]
        words = []
        for group in (same, peers):
            best = min(group, key=lambda peer: peer.ratio or 0.0, default=None)
            words.append(
                "–" if best is None else f"{best.format}: {number(best.median or 0.0, cell)}, {best.ratio:.2f} ×"
            )
        lines.append(f"| {cell.name} | {number(row.median or 0.0, cell)} {row.format} | {' | '.join(words)} |")
    return (
        "Our kernels op by op, one barrier an operation, in process and without the time between steps (the first arm "
        "of `headrace bench engine --ablate`):\n\n" + "\n".join(lines)
    )


def tokens(model: str) -> str:
    """Returns how many tokens go in and come out, of the cells where the name does not say it."""
    found = [
        f"{cell.name} {cell.prompt_tokens:,} in, {cell.output_tokens} out"
        for cell in CELLS[model]
        if cell.output_tokens
    ]
    return f"Tokens of each sequence: {'; '.join(found)}." if found else ""


def machine(session: Session) -> str:
    """Returns where and with what a session ran."""
    memory = f"{session.memory_bytes / 2**30:.0f} GiB"
    return (
        f"{session.started_at}, {session.cpu}, {session.cores} cores, {session.threads} threads, {memory}, kernels "
        f"{session.isa}, {session.system}, Headrace {session.commit}"
    )


def document(results: Results, suite: str, voids: Callable[[str], str] = lambda model: "") -> str:
    """Returns the whole of a suite as Markdown.

    Args:
        voids: says of a model what was left out.
    """
    parts = [f"# {OURS} beside its peers: {suite}", "", *(f"- {machine(session)}" for session in results.sessions)]
    for model in SUITES[suite]:
        if any(sample.model == model for sample in results.samples):
            parts += ["", section(results, model, voids(model))]
    return "\n".join(parts) + "\n"


def section(results: Results, model: str, voids: str = "") -> str:
    """Returns all tables of one model."""
    goal = f"Goal of a cell: {GOAL_RATIO} × the best peer, or {GOAL_SHARE:.0%} of the limit."
    title = f"## {TITLES[model]}"
    parts = [title, goal, tokens(model), summary(results, model), voids, arm(results, model)]
    parts += ["What limits it:", roofline(results, model), modes(results, model)]
    return "\n\n".join(part for part in [*parts, "Every engine and format:", details(results, model)] if part)
