"""What results hold and when they were used, units whose objects were let go, who owns the store, deletions with their proof."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# In place, never by a copy of the table: SQLite would drop the old one, and rows that refer to it with it.


def upgrade() -> None:
    op.add_column("commits", sa.Column("bytes", sa.BigInteger(), nullable=True))
    op.add_column("commits", sa.Column("last_used_at", sa.Double(), nullable=True))
    op.add_column("commits", sa.Column("sources", sa.JSON(none_as_null=True), nullable=True))
    op.create_index("ix_commits_job_id", "commits", ["job_id"])
    op.create_index("ix_commits_bytes", "commits", ["tenant", "stage", "bytes"])
    op.add_column("units", sa.Column("released_at", sa.Double(), nullable=True))
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
    op.drop_column("units", "released_at")
    op.drop_index("ix_commits_bytes", table_name="commits")
    op.drop_index("ix_commits_job_id", table_name="commits")
    for name in ("sources", "last_used_at", "bytes"):
        op.drop_column("commits", name)
