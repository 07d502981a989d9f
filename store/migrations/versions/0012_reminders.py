"""reminders."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_approval", sa.Column("remind_seconds", sa.Float(precision=53), nullable=True))
    op.add_column("keepstep_approval", sa.Column("remind_at", sa.Float(precision=53), nullable=True))
    op.add_column("keepstep_approval", sa.Column("reminders", sa.Integer(), server_default="0", nullable=False))
    where = sa.text("status = 'open' AND remind_at IS NOT NULL")
    op.create_index(
        "keepstep_approval_remind",
        "keepstep_approval",
        ["remind_at"],
        unique=False,
        postgresql_where=where,
        sqlite_where=where,
    )


def downgrade() -> None:
    """Undo."""
    op.drop_index("keepstep_approval_remind", table_name="keepstep_approval")
    for name in ("reminders", "remind_at", "remind_seconds"):
        op.drop_column("keepstep_approval", name)
