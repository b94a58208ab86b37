"""The tables, as SQLAlchemy sees them. A change here comes with a migration in ``migrations/versions``."""

from __future__ import annotations

from sqlalchemy import JSON, CheckConstraint, Column, Float, Index, Integer, MetaData, String, Table

# Named constraints, so that migrations can refer to them on every database.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# One row per run of `headrace serve`. ended_at_s and exit_code stay null when the machine lost power.
runs = Table(
    "runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("model", String(512), nullable=False),
    Column("version", String(64), nullable=False),
    Column("port", Integer, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at_s", Float, nullable=False),
    Column("ended_at_s", Float, nullable=True),
    Column("exit_code", Integer, nullable=True),
    CheckConstraint("(ended_at_s is null) = (exit_code is null)", name="ended_with_code"),
    Index(None, "started_at_s"),
)

# One row per load run that is kept for comparison with later ones. figures: name → one value a round.
measurements = Table(
    "measurements",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("series", String(200), nullable=False),
    Column("version", String(64), nullable=False),
    Column("measured_at_s", Float, nullable=False),
    Column("about", JSON, nullable=False),
    Column("figures", JSON, nullable=False),
    Index(None, "series", "measured_at_s"),
)
