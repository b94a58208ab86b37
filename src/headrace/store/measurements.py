"""Load runs that are kept, so that a later version can be held against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, delete, func, insert, select

from headrace.store.tables import measurements


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load run.

    Args:
        series: what is measured again and again: model, data and load of one machine.
        version: of the server that was measured.
        about: settings and machine, for people.
        figures: by name, one value for each round of the run.
    """

    id: int
    series: str
    version: str
    measured_at_s: float
    about: Mapping[str, str]
    figures: Mapping[str, Sequence[float]]


def add_measurement(
    engine: Engine,
    *,
    series: str,
    version: str,
    measured_at_s: float,
    about: Mapping[str, str],
    figures: Mapping[str, Sequence[float]],
) -> int:
    """Writes a run's figures and gives their id."""
    values = {
        "series": series,
        "version": version,
        "measured_at_s": measured_at_s,
        "about": dict(about),
        "figures": {name: list(found) for name, found in figures.items()},
    }
    with engine.begin() as connection:
        row = connection.execute(insert(measurements).values(values).returning(measurements.c.id)).one()
    return int(row.id)


def list_measurements(engine: Engine, series: str | None = None) -> list[Measurement]:
    """Gives all of a series, or of all series, oldest first."""
    query = select(measurements).order_by(measurements.c.measured_at_s, measurements.c.id)
    if series is not None:
        query = query.where(measurements.c.series == series)
    with engine.connect() as connection:
        return [Measurement(**row._mapping) for row in connection.execute(query)]


def remove_measurement(engine: Engine, measurement_id: int) -> bool:
    """Removes one; False where there is none of that id."""
    with engine.begin() as connection:
        return connection.execute(delete(measurements).where(measurements.c.id == measurement_id)).rowcount > 0


def count_series(engine: Engine) -> list[tuple[str, int]]:
    """Gives every series and how many measurements it has, by name."""
    query = select(measurements.c.series, func.count()).group_by(measurements.c.series).order_by(measurements.c.series)
    with engine.connect() as connection:
        return [(str(name), int(num)) for name, num in connection.execute(query)]
