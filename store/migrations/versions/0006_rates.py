"""rates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "keepstep_rate",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("level", sa.Float(precision=53), nullable=False),
        sa.Column("promised", sa.Float(precision=53), nullable=False),
        sa.Column("told_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("held_until", sa.Float(precision=53), nullable=False),
        sa.Column("idle_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", name="keepstep_rate_pkey"),
        postgresql_with={"fillfactor": 50},
    )
    op.create_index(
        "keepstep_rate_held",
        "keepstep_rate",
        ["held_until"],
        unique=False,
        postgresql_where=sa.text("held_until > 0"),
        sqlite_where=sa.text("held_until > 0"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_index(
        "keepstep_rate_held",
        table_name="keepstep_rate",
        postgresql_where=sa.text("held_until > 0"),
        sqlite_where=sa.text("held_until > 0"),
    )
    op.drop_table("keepstep_rate")
