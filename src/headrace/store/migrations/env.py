"""Runs migrations on the connection that ``store.database`` hands over."""

from __future__ import annotations

from alembic import context

from headrace.store.tables import metadata

connection = context.config.attributes["connection"]
# render_as_batch: SQLite alters a table by making it anew.
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True, transactional_ddl=False)
context.run_migrations()
