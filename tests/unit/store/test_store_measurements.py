from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from headrace.store.database import migrate, open_database, sqlite_url
from headrace.store.measurements import add_measurement, count_series, list_measurements, remove_measurement
from headrace.store.runs import add_run, list_runs
from headrace.store.tables import metadata


def add(engine: object, series: str, version: str, at: float) -> int:
    return add_measurement(
        engine,  # type: ignore[arg-type]
        series=series,
        version=version,
        measured_at_s=at,
        about={"cpu": "x"},
        figures={"E2E p50": [1.0, 2.0]},
    )


def test_measurements_are_there_after_reopening_oldest_first(tmp_path: Path) -> None:
    engine = open_database(sqlite_url(tmp_path / "a.db"))
    for series, version, at in (("s", "0.2", 20.0), ("s", "0.1", 10.0), ("t", "0.1", 5.0)):
        add(engine, series, version, at)
    engine.dispose()

    engine = open_database(sqlite_url(tmp_path / "a.db"))
    found = list_measurements(engine, "s")
    everything = list_measurements(engine)
    series = count_series(engine)
    engine.dispose()

    assert [(one.version, one.figures, one.about) for one in found] == [
        ("0.1", {"E2E p50": [1.0, 2.0]}, {"cpu": "x"}),
        ("0.2", {"E2E p50": [1.0, 2.0]}, {"cpu": "x"}),
    ]
    assert [one.series for one in everything] == ["t", "s", "s"]
    assert series == [("s", 2), ("t", 1)]


def test_one_measurement_can_be_removed(tmp_path: Path) -> None:
    engine = open_database(sqlite_url(tmp_path / "a.db"))
    first, second = add(engine, "s", "0.1", 1.0), add(engine, "s", "0.2", 2.0)

    removed = [remove_measurement(engine, first), remove_measurement(engine, first)]
    left = list_measurements(engine)
    engine.dispose()

    assert removed == [True, False]
    assert [one.id for one in left] == [second]


def test_a_database_of_the_first_release_is_brought_up_and_keeps_its_runs(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "a.db")
    old = create_engine(url)
    migrate(old, "0001")
    add_run(old, model="m", version="1", port=1, pid=1, started_at_s=1.0)
    old.dispose()

    engine = open_database(url)
    runs = list_runs(engine, limit=10)
    with engine.connect() as connection:
        difference = compare_metadata(MigrationContext.configure(connection), metadata)
    engine.dispose()

    assert [run.model for run in runs] == ["m"]
    assert difference == []
