"""undoing what a failed run did."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_thread", sa.Column("undoing", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("keepstep_effect", sa.Column("run_id", sa.Text(), nullable=True))
    op.add_column("keepstep_effect", sa.Column("undo", sa.Text(), nullable=True))
    op.add_column("keepstep_effect", sa.Column("undone", sa.Text(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("keepstep_effect", "undone")
    op.drop_column("keepstep_effect", "undo")
    op.drop_column("keepstep_effect", "run_id")
    op.drop_column("keepstep_thread", "undoing")
