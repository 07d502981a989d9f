"""clocks of workers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_worker", sa.Column("clock_skew", sa.Float(precision=53), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("keepstep_worker", "clock_skew")
