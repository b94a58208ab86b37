"""The table of load runs that are kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Makes the table."""
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("series", sa.String(200), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("measured_at_s", sa.Float, nullable=False),
        sa.Column("about", sa.JSON, nullable=False),
        sa.Column("figures", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_measurements"),
    )
    op.create_index("ix_measurements_series", "measurements", ["series", "measured_at_s"])


def downgrade() -> None:
    """Drops the table."""
    op.drop_index("ix_measurements_series", "measurements")
    op.drop_table("measurements")
