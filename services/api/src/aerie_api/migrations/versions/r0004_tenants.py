"""Tenants: a tenant on every row, keys, limits, usage, the audit log, and what a fair order of turns needs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_QUEUED, _RUNNING = sa.text("state = 'queued'"), sa.text("state = 'running'")
_OF_JOB = ("stages", "events", "logs", "metrics")
_TURN = ["tenant", "queue", "rank", "job_number", "position", "unit_index"]


def upgrade() -> None:
    _make_tables()
    _add("jobs", sa.Column("rank", sa.Integer(), nullable=False, server_default="0"))
    _add("units", sa.Column("rank", sa.Integer(), nullable=False, server_default="0"))
    _add("attempts", sa.Column("gpus", sa.Integer(), nullable=False, server_default="0"))
    for table in _OF_JOB:
        _add(table, sa.Column("tenant", sa.String(length=64), nullable=False, server_default=""))
        _fill_tenant(table, "job_id", "jobs")
    _add("attempts", sa.Column("tenant", sa.String(length=64), nullable=False, server_default=""))
    _fill_tenant("attempts", "unit_id", "units")
    op.create_index("ix_units_turn", "units", _TURN, sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    op.create_index("ix_units_running", "units", ["tenant", "queue"], sqlite_where=_RUNNING, postgresql_where=_RUNNING)
    op.create_index("ix_units_served", "units", ["tenant", "started_at"])


def _add(table: str, column: sa.Column[Any]) -> None:
    """Add a column in place, its default in the rows that there are: a copied table would take the rows that refer to it along."""
    op.add_column(table, column)


def _fill_tenant(table: str, reference: str, owner: str) -> None:
    """Give the rows of `table` the tenant of the row of `owner` that they hang on."""
    rows = sa.table(table, sa.column("tenant"), sa.column(reference))
    owners = sa.table(owner, sa.column("tenant"), sa.column("id"))
    tenant = sa.select(owners.c.tenant).where(owners.c.id == rows.c[reference]).scalar_subquery()
    op.execute(sa.update(rows).values(tenant=tenant))


def _make_tables() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_running_jobs", sa.Integer(), nullable=True),
        sa.Column("max_living_jobs", sa.Integer(), nullable=True),
        sa.Column("gpu_hours", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.execute("INSERT INTO tenants (id, created_at, weight) VALUES ('default', 0, 1)")
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("secret_hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_api_keys_created_at"), "api_keys", ["created_at"], unique=False)
    op.create_table(
        "audit",
        sa.Column("number", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key_id", sa.String(length=16), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=32), nullable=False),
        sa.Column("target", sa.String(length=64), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_tenant", "audit", ["tenant", "number"], unique=False)
    op.create_table(
        "usage",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("unit_seconds", sa.Double(), nullable=False),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "day"),
    )
    unlogged = ["UNLOGGED"] if op.get_bind().dialect.name == "postgresql" else []
    op.create_table(
        "rate_buckets",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("tokens", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("allowed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("key"),
        prefixes=unlogged,
    )


def downgrade() -> None:
    op.drop_index("ix_units_served", table_name="units")
    op.drop_index("ix_units_running", table_name="units", sqlite_where=_RUNNING, postgresql_where=_RUNNING)
    op.drop_index("ix_units_turn", table_name="units", sqlite_where=_QUEUED, postgresql_where=_QUEUED)
    for table, column in (
        *((name, "tenant") for name in ("attempts", *_OF_JOB)),
        ("attempts", "gpus"), ("units", "rank"), ("jobs", "rank"),
    ):  # fmt: skip
        op.drop_column(table, column)
    for table in ("rate_buckets", "usage", "audit", "api_keys", "tenants"):
        op.drop_table(table)
