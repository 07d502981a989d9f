"""Business tables of a user's, and what the tests of transactions do with them."""

from __future__ import annotations

from decimal import Decimal

from sqlalchemy import Column, ForeignKey, Integer, LargeBinary, MetaData, Numeric, String, Table, Uuid, insert, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

metadata = MetaData()
account = Table("account", metadata, Column("name", String, primary_key=True), Column("balance", Numeric(12, 2)))
entry = Table(
    "entry",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", ForeignKey("account.name")),
    Column("amount", Numeric(12, 2)),
    Column("key", Uuid),
    Column("proof", LargeBinary),
    Column("day", String, server_default="today"),
)


class Base(DeclarativeBase):
    """The models of a user."""

    metadata = metadata


class Order(Base):
    __tablename__ = "customer_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    lines: Mapped[list[Line]] = relationship(back_populates="order")


class Line(Base):
    __tablename__ = "order_line"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("customer_order.id"))
    price: Mapped[Decimal] = mapped_column(Numeric(12, 2))
    order: Mapped[Order] = relationship(back_populates="lines")


class Crash(Exception):
    """What a node raises after it acted."""


def crash():
    """Raise what a node raises after it acted."""
    raise Crash


def furnish(d):
    """Make the tables of the user's in a deployment's database."""
    metadata.create_all(d.store.engine)
    d.execute("INSERT INTO account VALUES ('anna', 100.00)")


def overtake(d):
    """Take the thread's lease away from who holds it; return a worker that goes on."""
    d.execute("UPDATE keepstep_thread SET lease_nonce = NULL, next_nudge_at = 0")
    other = d.worker_of(pid=9)
    d.sweep(worker=other)
    return other


def one_payment(ctx):
    """A node's body that pays once."""
    with ctx.transaction() as conn:
        return pay(conn, Decimal("1.00"))


def rows(d, table="entry", columns="name, amount"):
    """The rows of a table of the user's."""
    with d.store.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"SELECT {columns} FROM {table} ORDER BY 1, 2"))]


def pay(conn, amount, name="anna"):
    """Write an entry and return its id."""
    done = conn.execute(insert(entry).values(name=name, amount=amount).returning(entry.c.id))
    return done.scalar_one()


def transactions(d):
    """(state, calls) of the journal's transactions."""
    return [(state, calls) for name, state, calls in d.effects() if name == "transaction"]
