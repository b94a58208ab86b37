"""The table of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("port", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("started_at_s", sa.Float, nullable=False),
        sa.Column("ended_at_s", sa.Float, nullable=True),
        sa.Column("exit_code", sa.Integer, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.CheckConstraint("(ended_at_s is null) = (exit_code is null)", name=op.f("ck_runs_ended_with_code")),
    )
    op.create_index("ix_runs_started_at_s", "runs", ["started_at_s"])


def downgrade() -> None:
    """Drops the table."""
    op.drop_index("ix_runs_started_at_s", "runs")
    op.drop_table("runs")
