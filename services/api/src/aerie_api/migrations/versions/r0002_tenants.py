"""Several API processes on one database: an owner for every Idempotency-Key at work, steps as large as they are said."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("idempotency") as table:
        table.add_column(sa.Column("owner", sa.String(length=32), nullable=False, server_default=""))
    with op.batch_alter_table("idempotency") as table:
        table.alter_column("owner", server_default=None)
    with op.batch_alter_table("metrics") as table:
        table.alter_column("step", existing_type=sa.Integer(), type_=sa.BigInteger(), existing_nullable=False)


def downgrade() -> None:
    op.execute("DELETE FROM metrics WHERE step > 2147483647 OR step < -2147483648")
    with op.batch_alter_table("metrics") as table:
        table.alter_column("step", existing_type=sa.BigInteger(), type_=sa.Integer(), existing_nullable=False)
    with op.batch_alter_table("idempotency") as table:
        table.drop_column("owner")
