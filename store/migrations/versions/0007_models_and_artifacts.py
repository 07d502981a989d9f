"""models and artifacts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("keepstep_effect", sa.Column("meta", sa.LargeBinary(), nullable=True))
    op.add_column("keepstep_effect", sa.Column("artifact", sa.Text(), nullable=True))
    op.add_column("keepstep_effect", sa.Column("arguments_artifact", sa.Text(), nullable=True))
    op.create_table(
        "keepstep_artifact",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("bytes_count", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=True),
        sa.Column("location", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "digest", name="keepstep_artifact_pkey"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("keepstep_artifact")
    op.drop_column("keepstep_effect", "arguments_artifact")
    op.drop_column("keepstep_effect", "artifact")
    op.drop_column("keepstep_effect", "meta")
