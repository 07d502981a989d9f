"""What may be said inside a transaction's block: any statement, nothing that ends it, nothing else of ctx."""

from __future__ import annotations

import contextlib
import uuid
from decimal import Decimal

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.exc import IntegrityError, ResourceClosedError
from sqlalchemy.orm import Session

from keepstep import effect
from keepstep.errors import TransactionRefused
from tests.steps.business import (
    Crash,
    Line,
    Order,
    account,
    crash,
    entry,
    furnish,
    pay,
    rows,
    transactions,
)
from tests.steps.test_effects import AGAIN, acts


def test_orm_sessions_work_and_their_commit_does_not_end_the_block(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            with Session(bind=conn) as session:
                order = Order(name="chairs", lines=[Line(price=Decimal("1.50")) for _ in range(30)])
                session.add(order)
                session.commit()
                number = order.id
            with Session(bind=conn) as session:
                found = session.scalars(select(Order)).one()
                found.name = "tables"
                session.commit()
                total = sum(line.price for line in found.lines)
        if ctx.attempt == 1:
            raise Crash
        return [number, total]

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, Decimal("45.00")]]
    assert rows(d, "customer_order", "id, name") == [(1, "tables")]
    assert rows(d, "order_line", "count(*), 1") == [(30, 1)]


def test_a_session_that_committed_is_undone_with_the_block(shop):
    def body(ctx):
        try:
            with ctx.transaction() as conn, Session(bind=conn) as session:
                session.add(Order(name="chairs"))
                session.commit()
                crash()
        except Crash:
            return "undone"

    d = shop(acts(body))
    d.start()
    assert d.drain() == "done"
    assert rows(d, "customer_order", "id, name") == []


def test_savepoints_and_their_errors_are_played_again(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            try:
                with conn.begin_nested():
                    pay(conn, Decimal("1.00"))
                    conn.execute(account.insert().values(name="anna", balance=1))
            except IntegrityError as error:
                code = getattr(error.orig, "pgcode", None) or error.orig.sqlite_errorname
            with conn.begin_nested():
                pay(conn, Decimal("2.00"))
        if ctx.attempt == 1:
            raise Crash
        return code

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] in (["23505"], ["SQLITE_CONSTRAINT_PRIMARYKEY"])
    assert [float(amount) for _, amount in rows(d)] == [2.0]


@pytest.mark.parametrize("codec", ["msgpack", "json"])
def test_every_kind_of_statement_is_played_again(shop, codec):
    key, proof = uuid.UUID(int=7), bytes(range(256))

    def body(ctx):
        with ctx.transaction() as conn:
            many = [{"name": "anna", "amount": Decimal(n), "key": key, "proof": proof} for n in range(1, 4)]
            numbers = (
                conn.execute(insert(entry).returning(entry.c.id, sort_by_parameter_order=True), many).scalars().all()
            )
            conn.execute(
                text("INSERT INTO entry (name, amount) VALUES (:name, :amount)"), [{"name": "anna", "amount": 9}] * 2
            )
            plain = conn.execute(insert(entry).values(name="anna", amount=4)).inserted_primary_key[0]
            changed = conn.execute(entry.update().where(entry.c.amount == 9).values(amount=8)).rowcount
            stored = [
                tuple(row) for row in conn.execute(select(entry.c.key, entry.c.proof).where(entry.c.id == numbers[0]))
            ]
            one = conn.exec_driver_sql("SELECT 1 AS one").mappings().one()["one"]
            mine = str(ctx.uuid())
            conn.execute(text("UPDATE entry SET day = :day"), {"day": mine})
        if ctx.attempt == 1:
            raise Crash
        return [numbers, plain, changed, stored, one, mine]

    d = shop(acts(body, retry=AGAIN), codec=codec)
    d.start()
    assert d.drain() == "done"
    [[numbers, plain, changed, stored, one, mine]] = d.values()["log"]
    assert (numbers, plain, changed, stored, one) == ([1, 2, 3], 6, 2, [(key, proof)], 1)
    assert set(rows(d, "entry", "1, day")) == {(1, mine)}


@pytest.mark.parametrize("how", ["COMMIT", " /* so */ -- and\n rollback ", "begin", "ROLLBACK WORK", "commit()"])
def test_ending_the_transaction_is_refused_and_nothing_is_committed(shop, how):
    told = []

    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            with contextlib.suppress(TransactionRefused):  # it is not the block's to decide
                conn.commit() if how == "commit()" else conn.execute(text(how))
            told.append("went on")

    d = shop(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert d.error[1].startswith("ctx.transaction(): ")
    assert "is not for the block to say: " in d.error[1]
    assert told == ["went on"]
    assert rows(d) == []
    assert transactions(d) == []


@pytest.mark.parametrize("how", ["connection", "session", "close"])
def test_a_block_that_was_rolled_back_inside_runs_and_commits_nothing_more(shop, how):
    told = []

    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            if how == "session":
                session = Session(bind=conn)
                session.execute(select(account))
                session.rollback()
            else:
                conn.rollback() if how == "connection" else conn.close()
            try:
                pay(conn, Decimal("2.00"))
            except (TransactionRefused, ResourceClosedError) as error:
                told.append(type(error).__name__)

    d = shop(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert "was rolled back inside its block" in d.error[1]
    assert told == ["ResourceClosedError" if how == "close" else "TransactionRefused"]
    assert rows(d) == []


def test_what_went_wrong_in_a_session_is_what_is_told(shop):
    def body(ctx):
        with ctx.transaction() as conn, Session(bind=conn) as session:
            session.add_all([Order(id=1, name="chairs"), Order(id=1, name="tables")])
            session.commit()

    d = shop(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.thread.error["type"] == "IntegrityError"
    assert "tables" not in d.error[1]
    assert rows(d, "customer_order", "id, name") == []


def test_a_session_with_a_savepoint_of_its_own_may_roll_back(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            for name in ("chairs", "tables"):
                with Session(bind=conn, join_transaction_mode="create_savepoint") as session:
                    session.add(Order(name=name))
                    session.flush()
                    session.rollback() if name == "chairs" else session.commit()
        if ctx.attempt == 1:
            raise Crash

    d = shop(acts(body, retry=AGAIN))
    d.start()
    assert d.drain() == "done"
    assert [name for _, name in rows(d, "customer_order", "id, name")] == ["tables"]


def test_a_disguised_commit_is_noticed(served):
    def body(ctx):
        with ctx.transaction() as conn:
            conn.exec_driver_sql("SET LOCAL standard_conforming_strings = off")
            conn.exec_driver_sql("SELECT 'a\\'b'; COMMIT --'")

    d = served(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert "COMMIT --'\" is not for the block to say: it has ended the transaction" in d.error[1]
    assert transactions(d) == []


def test_there_is_no_other_connection_and_no_other_way_to_run_a_statement(shop):
    told = []

    def body(ctx):
        with ctx.transaction() as conn:
            with pytest.raises(TransactionRefused, match="use conn, or an engine of your own"):
                conn.engine.connect()
            with pytest.raises(AttributeError, match=r"cursor\.copy_expert is not recorded"):
                conn.connection.cursor().copy_expert("COPY", None)
            told.append(pay(conn, Decimal("1.00")))
        with pytest.raises(ResourceClosedError):
            conn.execute(text("SELECT 1"))

    d = shop(acts(body))
    d.start()
    assert d.drain() == "done"
    assert told == [1]


def test_a_statement_that_failed_outside_a_savepoint_commits_nothing_on_postgresql(served):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            with pytest.raises(IntegrityError):
                conn.execute(account.insert().values(name="anna", balance=1))

    d = served(acts(body))
    furnish(d)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert "begin_nested" in d.error[1]
    assert rows(d) == []


@effect(idempotent=True)
def read():
    return 1


ASKED = {
    "effect 'read'": lambda ctx: ctx.effect(read),
    "a wait": lambda ctx: ctx.approve("Now?"),
    "a wait ": lambda ctx: ctx.sleep(1),
    "a wait  ": lambda ctx: ctx.wait_signal("go"),
    "effect 'keepstep.now'": lambda ctx: ctx.now(),
    "a child of graph 'other'": lambda ctx: ctx.spawn("other", {}),
    "ctx.transaction()": lambda ctx: ctx.transaction(key="inner").__enter__(),
    "ctx.emit": lambda ctx: ctx.emit({}),
    "ctx.failures": lambda ctx: ctx.failures,
}


@pytest.mark.parametrize("what", ASKED)
def test_nothing_else_is_asked_inside_a_block(shop, what):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            ASKED[what](ctx)

    d = shop(acts(body))
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "transaction_refused"
    assert d.error[1] == (
        f"{what.strip()} inside ctx.transaction(): nothing else is asked of ctx while a transaction is open; "
        "ask before the block, or after it"
    )
    assert rows(d) == []


def test_what_is_asked_after_a_block_is_answered(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            number = pay(conn, Decimal("1.00"))
        ctx.emit({"paid": number})
        return [number, ctx.effect(read)]

    d = shop(acts(body))
    d.start()
    assert d.drain() == "done"
    assert d.values()["log"] == [[1, 1]]


def test_what_cannot_be_recorded_is_named_and_nothing_is_committed(served):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            conn.execute(text("SELECT 1 AS one, int4range(1, 5) AS span"))

    d = served(acts(body))
    furnish(d)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "not_storable"
    assert "column 'span' of statement 2" in d.error[1]
    assert rows(d) == []


def test_more_than_a_record_holds_is_refused_and_nothing_is_committed(shop):
    def body(ctx):
        with ctx.transaction() as conn:
            pay(conn, Decimal("1.00"))
            conn.execute(text("SELECT CAST(:long AS varchar)"), {"long": "x" * 5000}).scalar_one()

    d = shop(acts(body), value_bytes_max=4096)
    d.start()
    assert d.drain() == "failed"
    assert d.error[0] == "too_large"
    assert "more than 4096 bytes" in d.error[1]
    assert rows(d) == []
