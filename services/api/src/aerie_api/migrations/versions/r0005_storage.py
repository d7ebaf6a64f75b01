"""What results hold and when they were used, units whose objects were let go, who owns the store, deletions with their proof."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("commits") as table:
        table.add_column(sa.Column("bytes", sa.BigInteger(), nullable=True))
        table.add_column(sa.Column("last_used_at", sa.Double(), nullable=True))
        table.create_index("ix_commits_job_id", ["job_id"])
    with op.batch_alter_table("units") as table:
        table.add_column(sa.Column("released_at", sa.Double(), nullable=True))
    op.create_table(
        "store_owner",
        sa.Column("place", sa.String(length=16), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("place"),
    )
    op.create_table(
        "deletions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("prefixes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("digests", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.Column("remaining", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_deletions_tenant", "deletions", ["tenant"])
    op.create_table(
        "deleted_objects",
        sa.Column("deletion_id", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=1024), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("blake3", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["deletion_id"], ["deletions.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("deletion_id", "key"),
    )


def downgrade() -> None:
    op.drop_table("deleted_objects")
    op.drop_table("deletions")
    op.drop_table("store_owner")
    with op.batch_alter_table("units") as table:
        table.drop_column("released_at")
    with op.batch_alter_table("commits") as table:
        table.drop_index("ix_commits_job_id")
        table.drop_column("last_used_at")
        table.drop_column("bytes")
