"""schedules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "keepstep_schedule",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("application", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("graph_version", sa.Text(), nullable=True),
        sa.Column("thread", sa.Text(), nullable=False),
        sa.Column("input", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("missed", sa.Text(), nullable=False),
        sa.Column("overlap", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=True),
        sa.Column("step_limit", sa.Integer(), nullable=True),
        sa.Column("lease_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("paused", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True),
        sa.Column("updated_by", sa.Text(), nullable=True),
        sa.Column("next_at", sa.Float(precision=53), nullable=True),
        sa.Column("due_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_tick", sa.Float(precision=53), nullable=True),
        sa.Column("run_tick", sa.Float(precision=53), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("skipped_tick", sa.Float(precision=53), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("tenant", "application", "name", name="keepstep_schedule_name"),
    )
    op.create_index(
        "keepstep_schedule_due",
        "keepstep_schedule",
        ["due_at"],
        unique=False,
        postgresql_where=sa.text("due_at IS NOT NULL"),
        sqlite_where=sa.text("due_at IS NOT NULL"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("keepstep_schedule")
