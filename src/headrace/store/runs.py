"""The runs of `headrace serve`: one row each, written at start and end."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, insert, select, update

from headrace.store.tables import runs


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Args:
        ended_at_s, exit_code: None while it runs, or when its end was never written.
    """

    id: int
    model: str
    version: str
    port: int
    pid: int
    started_at_s: float
    ended_at_s: float | None
    exit_code: int | None


def add_run(engine: Engine, *, model: str, version: str, port: int, pid: int, started_at_s: float) -> int:
    """Writes a run's start and gives its id."""
    values = {"model": model, "version": version, "port": port, "pid": pid, "started_at_s": started_at_s}
    with engine.begin() as connection:
        row = connection.execute(insert(runs).values(values).returning(runs.c.id)).one()
    return int(row.id)


def end_run(engine: Engine, run_id: int, *, ended_at_s: float, exit_code: int) -> None:
    """Writes a run's end."""
    change = update(runs).where(runs.c.id == run_id).values(ended_at_s=ended_at_s, exit_code=exit_code)
    with engine.begin() as connection:
        connection.execute(change)


def list_runs(engine: Engine, *, limit: int) -> list[Run]:
    """Gives the latest runs, newest first."""
    query = select(runs).order_by(runs.c.started_at_s.desc(), runs.c.id.desc()).limit(limit)
    with engine.connect() as connection:
        return [Run(**row._mapping) for row in connection.execute(query)]
