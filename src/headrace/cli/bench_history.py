"""``headrace bench history``: load runs that are kept, and whether a later version is slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench_report import run_file
from headrace.cli.output import JsonOption, print_json, print_table
from headrace.cli.settings import ConfigOption, load_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from headrace.store.measurements import Measurement

app = typer.Typer(help="Keep load runs, and find what became slower.", no_args_is_help=True)
SeriesArgument = Annotated[str, typer.Argument(help="A series, as `bench history list` names it.")]


@app.callback()
def history() -> None:
    """Keep load runs, and find what became slower."""


@app.command()
def add(
    run: Annotated[Path, typer.Argument(help="A recorded run: a file, or a folder with run.jsonl.")],
    *,
    version: Annotated[str, typer.Option(help="Of the server that was measured: 0.2.0, a commit.", metavar="NAME")],
    series: Annotated[
        str | None,
        typer.Option(help="What is measured again and again; default: model, data and load.", metavar="NAME"),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a recorded run's figures under a version.

    Only like can be held against like: a series is one model, one set of requests and one load on one machine.

    Example: [bold]headrace bench history add report/ --version 0.2.0 --series "demo, 32 at once"[/]
    """
    from headrace.base.errors import ConfigError
    from headrace.bench import wording
    from headrace.bench.compare import recorded_rounds
    from headrace.bench.history import figures_of
    from headrace.bench.records import read_run
    from headrace.store.measurements import add_measurement

    found = read_run(run_file(run))
    settings, environment = found.settings, found.start.environment
    name = series or f"{settings.model}, {settings.data or 'made up'}, {wording.load_words(settings)}"
    for label, text, limit in (("--series", name, 200), ("--version", version, 64)):
        if not 0 < len(text) <= limit:
            raise ConfigError(f"{label} has {len(text)} characters: from 1 to {limit} are needed")
    figures = figures_of(recorded_rounds(found))
    about = {
        "server": settings.url,
        "model": settings.model,
        "data": settings.data,
        "load": wording.load_words(settings),
        "cpu": f"{environment.cpu}, {environment.num_cpus} CPUs",
        "headrace": environment.headrace,
    }
    with _store(config) as engine:
        measurement_id = add_measurement(
            engine, series=name, version=version, measured_at_s=found.start.started_at_s, about=about, figures=figures
        )
    if as_json:
        print_json({"id": measurement_id, "series": name, "version": version})
    else:
        typer.echo(f"kept as {measurement_id}: {name}, version {version}")


@app.command("list")
def list_(
    *,
    series: Annotated[str | None, typer.Option(help="Only this one.", metavar="NAME")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what is kept: series, version, date, figures."""
    from headrace.bench import wording
    from headrace.store.measurements import list_measurements

    with _store(config) as engine:
        found = list_measurements(engine, series)
    if as_json:
        print_json([_plain(one, with_rounds=False) for one in found])
        return
    rows = [(str(one.id), one.series, one.version, wording.moment(one.measured_at_s), _middles(one)) for one in found]
    print_table(("id", "series", "version", "measured", "figures"), rows)


@app.command()
def show(
    series: SeriesArgument,
    *,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with every figure over the versions there.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a series: every version's figures, and as a page how they went.

    Example: [bold]headrace bench history show "demo, 32 at once" --output history.html[/]
    """
    import numpy as np

    from headrace.base.errors import ConfigError
    from headrace.bench.compare import FIGURES
    from headrace.bench.history import check as run_check
    from headrace.bench.history import figure_words, history_page, versions_of

    runs = _runs(series, config)
    versions = versions_of(runs)
    if output is not None:
        from headrace.bench.report import write_files

        try:
            found = run_check(series, runs)
        except ConfigError:
            found = None  # one version alone is a history, too
        write_files(output.parent, {output.name: history_page(series, runs, found).encode()})
    names = [figure.name for figure in FIGURES if any(len(one.values(figure.name)) for one in versions)]
    middles = [
        {name: float(np.median(values)) for name in names if len(values := one.values(name))} for one in versions
    ]
    if as_json:
        print_json(
            [
                {"version": one.name, "runs": len(one.runs), "figures": found}
                for one, found in zip(versions, middles, strict=True)
            ]
        )
        return
    rows = [
        (one.name, str(len(one.runs)), *(figure_words(name, found[name]) if name in found else "–" for name in names))
        for one, found in zip(versions, middles, strict=True)
    ]
    print_table(("version", "runs", *names), rows)
    if output is not None:
        typer.echo(f"written: {output}")


@app.command()
def check(
    series: SeriesArgument,
    *,
    against: Annotated[
        str | None,
        typer.Option(help="The version to hold the newest against; default: the one before.", metavar="NAME"),
    ] = None,
    drop: Annotated[float, typer.Option(help="Percent of loss that counts.", min=0.1, max=90, metavar="P")] = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether the newest version is slower than an earlier one: the check of a release or a quarter.

    A drop counts when it is as large as --drop and more than chance (1 of 100). Exit code: 0 none, 1 a drop.

    Example: [bold]headrace bench history check "demo, 32 at once"[/]
    """
    from headrace.bench.history import check as run_check
    from headrace.bench.history import check_words, figure_words

    found = run_check(series, _runs(series, config), against=against, drop_ratio=drop / 100)
    if as_json:
        print_json(found)
    else:
        rows = [
            (
                change.name,
                figure_words(change.name, change.before),
                figure_words(change.name, change.now),
                f"{change.ratio:.3f}",
                f"{'?' if change.ratio_low is None else f'{change.ratio_low:.3f}'}–"
                f"{'?' if change.ratio_high is None else f'{change.ratio_high:.3f}'}",
                "DROP" if change.is_drop else "",
            )
            for change in found.changes
        ]
        print_table(("", found.version_before, found.version_now, "ratio", "99 % interval", ""), rows)
        typer.echo(check_words(found))
    raise typer.Exit(1 if found.drops else 0)


@app.command()
def export(
    *,
    series: Annotated[str | None, typer.Option(help="Only this one.", metavar="NAME")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print what is kept, every round of it: a JSON line for each run, or with --json one list."""
    import sys

    import msgspec

    from headrace.store.measurements import list_measurements

    with _store(config) as engine:
        found = [_plain(one, with_rounds=True) for one in list_measurements(engine, series)]
    if as_json:
        print_json(found)
        return
    for one in found:
        sys.stdout.write(msgspec.json.encode(one).decode() + "\n")


@app.command()
def remove(
    measurement_id: Annotated[int, typer.Argument(metavar="ID", help="As `bench history list` shows it.")],
    *,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a run that should not have been kept."""
    from headrace.base.errors import ConfigError
    from headrace.store.measurements import remove_measurement

    with _store(config) as engine:
        is_removed = remove_measurement(engine, measurement_id)
    if not is_removed:
        raise ConfigError(f"no run is kept as {measurement_id}", hint="headrace bench history list")
    if as_json:
        print_json({"removed": measurement_id})
    else:
        typer.echo(f"removed: {measurement_id}")


@contextmanager
def _store(config: Path | None) -> Iterator[Engine]:
    from headrace.cli.history import open_store

    settings = load_settings(config, {})
    engine = open_store(settings.store.url, settings.paths.state)
    try:
        yield engine
    finally:
        engine.dispose()


def _runs(series: str, config: Path | None) -> list[Measurement]:
    from difflib import get_close_matches

    from headrace.base.errors import ConfigError
    from headrace.store.measurements import count_series, list_measurements

    with _store(config) as engine:
        found = list_measurements(engine, series)
        names = [name for name, _ in count_series(engine)]
    if not found:
        near = get_close_matches(series, names, 1) or names[:1]
        hint = f"the nearest is {near[0]!r}" if near else "nothing is kept yet: headrace bench history add"
        raise ConfigError(f"there is no series {series!r}", hint=hint)
    return found


def _plain(one: Measurement, *, with_rounds: bool) -> dict[str, object]:
    import numpy as np

    figures = dict(one.figures) if with_rounds else {name: float(np.median(v)) for name, v in one.figures.items()}
    return {
        "id": one.id,
        "series": one.series,
        "version": one.version,
        "measured_at_s": one.measured_at_s,
        "about": dict(one.about),
        "figures": figures,
    }


def _middles(one: Measurement) -> str:
    import numpy as np

    from headrace.bench.history import figure_words

    return ", ".join(f"{name} {figure_words(name, float(np.median(values)))}" for name, values in one.figures.items())
