"""children."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "keepstep_child",
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("application", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("graph_version", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("child_id", sa.Text(), nullable=True),
        sa.Column("input", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("lease_seconds", sa.Float(precision=53), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("cancel", sa.Integer(), server_default="0", nullable=False),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("branch", sa.Integer(), nullable=True),
        sa.Column("seq", sa.Integer(), nullable=True),
        sa.Column("due_at", sa.Float(precision=53), nullable=True),
        sa.Column("tries", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.PrimaryKeyConstraint("thread_id", "step", "run", "call", name="keepstep_child_pkey"),
        sa.UniqueConstraint("run_id", name="keepstep_child_run"),
    )
    op.create_index("keepstep_child_thread", "keepstep_child", ["child_id"], unique=False)
    op.create_index(
        "keepstep_child_due",
        "keepstep_child",
        ["due_at"],
        unique=False,
        postgresql_where=sa.text("due_at IS NOT NULL"),
        sqlite_where=sa.text("due_at IS NOT NULL"),
    )
    op.add_column("keepstep_run", sa.Column("spawned", sa.Integer(), server_default="0", nullable=False))
    op.add_column("keepstep_wait", sa.Column("child_run", sa.Text(), nullable=True))
    op.create_index(
        "keepstep_wait_child",
        "keepstep_wait",
        ["child_run"],
        unique=False,
        postgresql_where=sa.text("child_run IS NOT NULL"),
        sqlite_where=sa.text("child_run IS NOT NULL"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_index(
        "keepstep_wait_child",
        table_name="keepstep_wait",
        postgresql_where=sa.text("child_run IS NOT NULL"),
        sqlite_where=sa.text("child_run IS NOT NULL"),
    )
    op.drop_column("keepstep_wait", "child_run")
    op.drop_column("keepstep_run", "spawned")
    op.drop_index(
        "keepstep_child_due",
        table_name="keepstep_child",
        postgresql_where=sa.text("due_at IS NOT NULL"),
        sqlite_where=sa.text("due_at IS NOT NULL"),
    )
    op.drop_index("keepstep_child_thread", table_name="keepstep_child")
    op.drop_table("keepstep_child")
