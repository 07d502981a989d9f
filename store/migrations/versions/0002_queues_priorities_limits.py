"""queues of each graph, priorities, limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_READY = sa.text("status = 'ready'")


def upgrade() -> None:
    """Apply."""
    for table in ("keepstep_thread", "keepstep_node_run"):
        op.add_column(table, sa.Column("queue", sa.Text(), nullable=False, server_default=""))
        op.add_column(table, sa.Column("priority", sa.Integer(), nullable=False, server_default="1"))
    op.execute(
        "UPDATE keepstep_thread SET queue = replace(replace(agent, '%', '%25'), '@', '%40') || '@' || graph_version"
    )
    op.execute(
        "UPDATE keepstep_node_run SET queue = (SELECT t.queue FROM keepstep_thread t WHERE t.id = thread_id)"
        " WHERE EXISTS (SELECT 1 FROM keepstep_thread t WHERE t.id = thread_id)"
    )
    for table in ("keepstep_thread", "keepstep_node_run"):
        op.drop_index(f"{table}_due", table_name=table)
        op.create_index(
            f"{table}_due",
            table,
            ["queue", "priority", "tenant", "next_nudge_at"],
            postgresql_where=_READY,
            sqlite_where=_READY,
        )
    op.create_table(
        "keepstep_limit",
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("running_max", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name="keepstep_limit_pkey"),
    )
    op.create_table(
        "keepstep_slot",
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("nonce", sa.Text(), nullable=False),
        sa.Column("thread_id", sa.Text(), nullable=False),
        sa.Column("branch", sa.Integer(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("taken_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("scope", "nonce", name="keepstep_slot_pkey"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("keepstep_slot")
    op.drop_table("keepstep_limit")
    for table in ("keepstep_thread", "keepstep_node_run"):
        op.drop_index(f"{table}_due", table_name=table)
        op.create_index(f"{table}_due", table, ["next_nudge_at"], postgresql_where=_READY, sqlite_where=_READY)
        op.drop_column(table, "priority")
        op.drop_column(table, "queue")
