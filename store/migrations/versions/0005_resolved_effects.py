"""resolved effects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_effect", sa.Column("arguments", sa.LargeBinary(), nullable=True))
    op.add_column("keepstep_effect", sa.Column("resolved_by", sa.Text(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("keepstep_effect", "resolved_by")
    op.drop_column("keepstep_effect", "arguments")
