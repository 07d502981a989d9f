"""A producer's outbox: what is written with its transaction, by whatever connection it has, and what a relay finds."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing

import psycopg2
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable

from keepstep import Client, errors
from keepstep.store.outbox import Outbox
from keepstep.store.outbox import outbox as table


@pytest.fixture(params=["sqlite", "postgresql"])
def producer(request, tmp_path):
    """The URL of a producer's own database, with an outbox."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'shop.db'}"
    else:
        url = request.getfixturevalue("empty_postgresql_url")
    outbox = Outbox.open(url)
    assert outbox.install() is True
    assert outbox.install() is False
    outbox.dispose()
    return url


@pytest.fixture
def engine(producer):
    made = sa.create_engine(producer)
    with made.begin() as connection:
        connection.execute(sa.text("CREATE TABLE sale (id integer)"))
    yield made
    made.dispose()


@pytest.fixture
def outbox(producer):
    opened = Outbox.open(producer)
    yield opened
    opened.dispose()


@pytest.fixture
def client(tmp_path):
    with Client(f"file://{tmp_path / 'broker'}", tenant="acme") as made:
        yield made


def found(outbox, size=100):
    with outbox.batch(size) as batch:
        return [json.loads(each.body) for each in batch.found]


def sell(connection):
    connection.execute(sa.text("INSERT INTO sale VALUES (1)"))


def raw(producer):
    url = make_url(producer)
    if url.get_backend_name() == "sqlite":
        return sqlite3.connect(url.database)
    return psycopg2.connect(url.set(drivername="postgresql").render_as_string(hide_password=False))


def start(client, connection, thread="order-1"):
    return client.start("refunds", thread, {"amount": "12.50 €"}, connection=connection)


def expected(receipt, thread="order-1"):
    return {
        "v": 1,
        "verb": "start",
        "id": receipt.id,
        "tenant": "acme",
        "graph": "refunds",
        "thread": thread,
        "application": "default",
        "input": {"amount": "12.50 €"},
        "if_running": "queue",
    }


# --- writing ----------------------------------------------------------------------------------------------------------


def by_connection(engine):
    return engine.connect()


def by_session(engine):
    return Session(engine)


@pytest.mark.parametrize("opened", [by_connection, by_session])
def test_sqlalchemy_writes_with_its_transaction(client, engine, outbox, opened):
    with opened(engine) as connection:
        sell(connection)
        start(client, connection)
        connection.rollback()
    assert found(outbox) == []
    with opened(engine) as connection:
        sell(connection)
        receipt = start(client, connection)
        connection.commit()
    assert found(outbox) == [expected(receipt)]
    with pytest.raises(errors.NotConfirmed, match="stands in your outbox"):
        receipt.accepted()


def test_a_dbapi_connection_writes_with_its_transaction(client, producer, outbox):
    with closing(raw(producer)) as connection:
        start(client, connection)
        connection.rollback()
        receipt = start(client, connection)
        connection.commit()
    assert found(outbox) == [expected(receipt)]


def test_a_pooled_connection_is_a_dbapi_connection(client, engine, outbox):
    with closing(engine.raw_connection()) as connection:
        receipt = start(client, connection)
        connection.commit()
    assert found(outbox) == [expected(receipt)]


def test_django_writes_with_its_transaction(client, tmp_path):
    django = pytest.importorskip("django")
    from django.conf import settings

    path = tmp_path / "shop.db"
    outbox = Outbox.open(f"sqlite:///{path}")
    outbox.install()
    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}})
        django.setup()
    from django.db import connection as of_thread
    from django.db import connections, transaction
    from django.db.utils import ConnectionHandler

    handler = ConnectionHandler({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}})
    connections["default"] = handler["default"]
    connection = connections["default"]
    for each in (connection, of_thread):
        with pytest.raises(errors.InvalidInput, match="commits each statement by itself"):
            start(client, each)

    def fails():
        with transaction.atomic():
            start(client, connection)
            start(client, of_thread)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    with transaction.atomic():
        receipts = [start(client, each, thread) for each, thread in ((connection, "order-1"), (of_thread, "order-2"))]
    connection.close()
    assert found(outbox) == [expected(receipts[0]), expected(receipts[1], "order-2")]
    outbox.dispose()


def test_a_connection_that_commits_by_itself_is_refused(client, engine, producer, outbox):
    alone = engine.execution_options(isolation_level="AUTOCOMMIT")
    with alone.connect() as connection, pytest.raises(errors.InvalidInput, match="begin a transaction first"):
        start(client, connection)
    with closing(raw(producer)) as connection:
        if isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
        else:
            connection.autocommit = True
        with pytest.raises(errors.InvalidInput, match="begin a transaction first"):
            start(client, connection)
        cursor = connection.cursor()
        cursor.execute("BEGIN")
        receipt = start(client, connection)
        cursor.execute("COMMIT")
    assert found(outbox) == [expected(receipt)]


@pytest.mark.parametrize("opened", [by_connection, by_session])
def test_an_engine_whose_connections_commit_by_themselves_is_refused(client, producer, outbox, opened):
    alone = sa.create_engine(producer, isolation_level="AUTOCOMMIT")
    with opened(alone) as connection, pytest.raises(errors.InvalidInput, match="begin a transaction first"):
        start(client, connection)
    with closing(alone.raw_connection()) as connection, pytest.raises(errors.InvalidInput, match="begin a transaction"):
        start(client, connection)
    isolation = "SERIALIZABLE"
    with alone.connect().execution_options(isolation_level=isolation) as connection:
        start(client, connection)
        connection.rollback()
        receipt = start(client, connection)
        connection.commit()
    alone.dispose()
    assert found(outbox) == [expected(receipt)]


def test_a_driver_that_commits_by_itself_is_refused_whoever_made_the_engine(client, producer, outbox):
    def connect():
        connection = raw(producer)
        if isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
        else:
            connection.autocommit = True
        return connection

    made = sa.create_engine(producer, creator=connect)
    with made.connect() as connection:
        with pytest.raises(errors.InvalidInput, match="begin a transaction first"):
            start(client, connection)
        connection.exec_driver_sql("BEGIN")
        receipt = start(client, connection)
        connection.exec_driver_sql("COMMIT")
    made.dispose()
    assert found(outbox) == [expected(receipt)]


class AsyncCursor(sqlite3.Cursor):
    """A cursor as async drivers have it."""

    async def execute(self, *given):
        return super().execute(*given)


class AsyncConnection(sqlite3.Connection):
    """A connection whose cursors are awaited."""

    def cursor(self):
        return super().cursor(AsyncCursor)


def test_a_driver_that_is_awaited_is_refused(client, tmp_path):
    with closing(sqlite3.connect(tmp_path / "shop.db", factory=AsyncConnection)) as connection:
        with pytest.raises(errors.InvalidInput, match="an async connection cannot be written to"):
            start(client, connection)
        assert not connection.in_transaction


@pytest.mark.parametrize("connection", ["postgresql://", 7, object()])
def test_what_is_no_connection_is_refused(client, connection):
    with pytest.raises(errors.InvalidInput, match=r"connection: a .* is none that can be written to"):
        start(client, connection)


def test_a_missing_table_names_the_way_out(client, empty_postgresql_url, tmp_path):
    for url in (empty_postgresql_url, f"sqlite:///{tmp_path / 'empty.db'}"):
        engine = sa.create_engine(url)
        with engine.connect() as connection, pytest.raises(errors.SchemaMismatch, match="keepstep db install-outbox"):
            start(client, connection)
        engine.dispose()
        outbox = Outbox.open(url)
        with pytest.raises(errors.SchemaMismatch, match="keepstep db install-outbox"), outbox.batch(1):
            pass
        outbox.dispose()


def test_bad_input_is_refused_before_anything_is_written(client, engine, outbox):
    with engine.begin() as connection, pytest.raises(errors.NotStorable, match=r"\$\.input\.when"):
        client.start("refunds", "order-1", {"when": object()}, connection=connection)
    assert found(outbox) == []


# --- reading ----------------------------------------------------------------------------------------------------------


def written(client, engine, *threads):
    with engine.begin() as connection:
        return [start(client, connection, thread).id for thread in threads]


def test_the_oldest_come_first_and_what_is_accepted_goes(client, engine, outbox):
    first, second, third = written(client, engine, "a", "b", "c")
    with outbox.batch(2) as batch:
        assert [each.id for each in batch.found] == [first, second]
        batch.accepted.append(first)
        batch.refused[second] = '{"code": "unknown_graph"}'
    assert outbox.counts() == {"waiting": 1, "refused": 1}
    assert [each["id"] for each in found(outbox)] == [third]
    (refused,) = outbox.refused(10)
    assert (refused.id, refused.error) == (second, '{"code": "unknown_graph"}')
    assert json.loads(refused.body)["thread"] == "b"


def test_what_was_answered_is_written_when_the_relay_fails_then(client, engine, outbox):
    first, second = written(client, engine, "a", "b")

    def fails():
        with outbox.batch(10) as batch:
            batch.accepted.append(first)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        fails()
    assert [each["id"] for each in found(outbox)] == [second]


def test_two_relays_do_not_send_the_same_where_rows_can_be_locked(client, engine, producer, outbox):
    first, second = written(client, engine, "a", "b")
    other = Outbox.open(producer)
    with outbox.batch(1) as one, other.batch(10) as two:
        assert [each.id for each in one.found] == [first]
        locks = engine.dialect.name != "sqlite"
        assert [each.id for each in two.found] == ([second] if locks else [first, second])
    other.dispose()


def test_a_producer_is_not_held_up_by_a_relay_that_waits(client, engine, outbox):
    written(client, engine, "a")
    with outbox.batch(10):
        written(client, engine, "b")
    assert outbox.counts()["waiting"] == 2


def test_the_statements_for_those_who_make_it_by_hand_make_it(client, tmp_path, outbox):
    url = f"sqlite:///{tmp_path / 'by_hand.db'}"
    by_hand = Outbox.open(url)
    with closing(sqlite3.connect(tmp_path / "by_hand.db")) as connection:
        connection.executescript(by_hand.definition())
        receipt = start(client, connection)
        connection.commit()
    assert found(by_hand) == [expected(receipt)]
    by_hand.dispose()


def test_on_mysql_a_message_of_any_size_fits():
    text = str(CreateTable(table).compile(dialect=mysql.dialect()))
    assert "body LONGTEXT NOT NULL" in text


def test_a_url_that_is_none_is_refused_without_showing_it():
    for url in ("shop:secret", "nothing://shop:secret@db/shop"):
        with pytest.raises(errors.InvalidSettings, match="SQLAlchemy URL") as refused:
            Outbox.open(url)
        assert "secret" not in str(refused.value)
