"""Alembic's entry: migrates over the connection that `aerie_api.db` hands over, in the caller's transaction."""

from __future__ import annotations

from alembic import context

from aerie_api.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    transaction_per_migration=False,
)
context.run_migrations()
