"""The batch's own table: what became of each refund, in the words of the agent that paid it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Column, Connection, Integer, MetaData, String, Table, insert, select

_METADATA = MetaData()
_TABLE = Table(
    "refund_outcome",
    _METADATA,
    Column("batch", String, primary_key=True),
    Column("refund", String, primary_key=True),
    Column("status", String, nullable=False),
    Column("cents", Integer, nullable=False),
)


@dataclass(frozen=True)
class Outcome:
    """One row: `cents` is what was paid."""

    refund: str
    status: str
    cents: int


def add(connection: Connection, batch: str, outcomes: Iterable[Outcome]) -> None:
    """Write the rows of a batch. A second row for a refund is refused by the table's key."""
    _METADATA.create_all(connection)
    rows = [{"batch": batch, "refund": each.refund, "status": each.status, "cents": each.cents} for each in outcomes]
    connection.execute(insert(_TABLE), rows)


def of(connection: Connection, batch: str) -> list[Outcome]:
    """Return the rows of a batch."""
    wanted = select(_TABLE.c.refund, _TABLE.c.status, _TABLE.c.cents).where(_TABLE.c.batch == batch)
    return [Outcome(*row) for row in connection.execute(wanted.order_by(_TABLE.c.refund))]
