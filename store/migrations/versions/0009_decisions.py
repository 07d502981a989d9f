"""decisions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_approval", sa.Column("assigned", sa.Text(), nullable=True))
    op.add_column("keepstep_approval", sa.Column("escalate_to", sa.Text(), nullable=True))
    op.add_column("keepstep_approval", sa.Column("escalated", sa.Integer(), server_default="0", nullable=False))
    op.add_column("keepstep_approval", sa.Column("expires_seconds", sa.Float(precision=53), nullable=True))
    op.add_column("keepstep_run", sa.Column("started_by", sa.Text(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("keepstep_run", "started_by")
    for name in ("expires_seconds", "escalated", "escalate_to", "assigned"):
        op.drop_column("keepstep_approval", name)
