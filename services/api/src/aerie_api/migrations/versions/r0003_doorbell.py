"""Rings owed, progress watched, workers set aside, jobs paused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_OWED = sa.text("state = 'queued' AND rung_at IS NULL")
_WAS_LIVING = sa.text("status IN ('queued', 'running', 'cancelling')")
_LIVING = sa.text("status IN ('queued', 'running', 'paused', 'cancelling')")


# Columns are added and dropped in place: SQLite would otherwise copy the table and drop the old one, and the rows
# that refer to it (attempts to units) would go with it.


def upgrade() -> None:
    op.drop_index("uq_jobs_living_name", table_name="jobs")
    _living_names(_LIVING)
    op.add_column("units", sa.Column("rung_at", sa.Double(), nullable=True))
    op.add_column("units", sa.Column("moved_at", sa.Double(), nullable=True))
    op.add_column("units", sa.Column("longest_step_s", sa.Double(), nullable=True))
    op.create_index("ix_units_owed", "units", ["not_before"], sqlite_where=_OWED, postgresql_where=_OWED)
    op.create_index("ix_units_worker", "units", ["worker_id"])
    op.add_column("attempts", sa.Column("blames_worker", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.create_index("ix_attempts_worker", "attempts", ["worker_id", "ended_at"])
    op.add_column("workers", sa.Column("set_aside", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("workers", sa.Column("set_aside_at", sa.Double(), nullable=True))
    op.add_column("workers", sa.Column("readmitted_at", sa.Double(), nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("readmitted_at", "set_aside_at", "set_aside"):
        op.drop_column("workers", name)
    op.drop_index("ix_attempts_worker", table_name="attempts")
    op.drop_column("attempts", "blames_worker")
    op.drop_index("ix_units_owed", table_name="units")
    op.drop_index("ix_units_worker", table_name="units")
    # The older code knows no pause: what was paused waits for a worker again.
    op.execute("UPDATE units SET state = 'queued' WHERE state = 'paused'")
    op.execute("UPDATE jobs SET status = 'queued', reason = NULL WHERE status = 'paused'")
    for name in ("longest_step_s", "moved_at", "rung_at"):
        op.drop_column("units", name)
    op.drop_index("uq_jobs_living_name", table_name="jobs")
    _living_names(_WAS_LIVING)


def _living_names(living: sa.TextClause) -> None:
    op.create_index(
        "uq_jobs_living_name", "jobs", ["tenant", "name"], unique=True, sqlite_where=living, postgresql_where=living
    )
