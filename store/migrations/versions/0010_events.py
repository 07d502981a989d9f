"""events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    with op.batch_alter_table("keepstep_event") as event:
        event.alter_column("payload", existing_type=sa.LargeBinary(), nullable=True)
        event.add_column(sa.Column("kind", sa.Text(), server_default="node.emitted", nullable=False))
        event.add_column(sa.Column("approval_id", sa.Text(), nullable=True))
        event.add_column(sa.Column("detail", sa.Text(), nullable=True))
        event.add_column(sa.Column("position", sa.BigInteger(), nullable=True))
        event.create_unique_constraint("keepstep_event_position", ["position"])
    # What was told before there was a log stands in it, and is published to nobody.
    op.execute("UPDATE keepstep_event SET position = id")
    op.create_index("keepstep_event_tenant", "keepstep_event", ["tenant", "position"], unique=False)
    op.create_index(
        "keepstep_event_unplaced",
        "keepstep_event",
        ["id"],
        unique=False,
        postgresql_where=sa.text("position IS NULL"),
        sqlite_where=sa.text("position IS NULL"),
    )
    op.create_table(
        "keepstep_mark",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("held_until", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    for name in ("placed", "published"):
        op.execute(
            "INSERT INTO keepstep_mark (name, position, holder, held_until) "  # noqa: S608  the names are ours
            f"SELECT '{name}', coalesce(max(position), 0), NULL, 0 FROM keepstep_event"
        )


def downgrade() -> None:
    """Undo."""
    op.drop_table("keepstep_mark")
    op.drop_index("keepstep_event_unplaced", table_name="keepstep_event")
    op.drop_index("keepstep_event_tenant", table_name="keepstep_event")
    op.execute("DELETE FROM keepstep_event WHERE kind <> 'node.emitted'")
    with op.batch_alter_table("keepstep_event") as event:
        event.drop_constraint("keepstep_event_position", type_="unique")
        for name in ("position", "detail", "approval_id", "kind"):
            event.drop_column(name)
        event.alter_column("payload", existing_type=sa.LargeBinary(), nullable=False)
