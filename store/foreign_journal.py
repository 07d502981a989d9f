"""Transactions on a database that is not the store's: its own journal table says which of them were committed.

`keepstep_journal` stands beside the business rows. A transaction first inserts the row of its key there, so that two
attempts at once wait for each other at the unique key, and writes its tape into it before it commits. Whether it was
committed is thus known in that database, whatever the store has heard of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    DateTime,
    Engine,
    LargeBinary,
    MetaData,
    Table,
    Text,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.schema import CreateTable

from keepstep.crashpoints import reach
from keepstep.errors import InvalidInput, JournalMissing, NodeTimeout
from keepstep.store.statements import Statement, param
from keepstep.store.taped import Recording, TapedEngine
from keepstep.store.tapes import Tape
from keepstep.store.transactions import failed_before, time_limits

_DRIVERS = {"postgresql": "psycopg2", "sqlite": "pysqlite"}
_PAUSE_SECONDS = 0.02
_FAILED_BEFORE = "25P02"
_CONTENTION = ("40001", "40P01")
_TIMED_OUT = ("57014", "55P03")
_NO_TABLE = "42P01"

journal = Table(
    "keepstep_journal",
    MetaData(),
    Column("digest", Text, primary_key=True),  # of the key: a key may be longer than an index takes
    Column("key", Text, nullable=False),  # the idempotency key: step key, node run and call
    Column("thread", Text, nullable=False),  # the thread's id in Keepstep
    Column("tape", LargeBinary),  # what its statements were answered; written before the commit
    Column("recorded_at", DateTime(timezone=True), nullable=False, server_default=func.current_timestamp()),
)
_INSERT = Statement(
    lambda _dialect: insert(journal).values(digest=param("digest"), key=param("key"), thread=param("thread"))
)
_RECORD = Statement(
    lambda _dialect: update(journal).where(journal.c.digest == param("digest")).values(tape=param("tape"))
)


def ddl(engine: Engine) -> str:
    """Return the statement that makes the journal table, which does nothing where it is."""
    return " ".join(str(CreateTable(journal, if_not_exists=True).compile(dialect=engine.dialect)).split()) + ";"


def install(engine: Engine) -> bool:
    """Make the journal table; return whether it was not there yet."""
    with engine.begin() as connection:
        there = engine.dialect.has_table(connection, journal.name)
        journal.create(connection, checkfirst=True)
    return not there


def problem_of(url: URL) -> str | None:
    """Return why transactions cannot be had on the database of a URL."""
    backend, _, driver = url.drivername.partition("+")
    # The dialect that is meant when none is named is SQLAlchemy's choice, and not the same in each of its releases.
    if _DRIVERS.get(backend) == (driver or url.get_driver_name()):
        return None
    known = ", ".join(f"{backend}+{driver}" for backend, driver in _DRIVERS.items())
    return f"{url.drivername} is not a database that ctx.transaction can use ({known})"


def checked_url(url: str) -> URL:
    """Return a URL with the driver that is used here; raise `InvalidInput`, which never quotes it."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        message = "not a database URL; use postgresql://user@host/name or sqlite:///file.db"
        raise InvalidInput(message) from None
    driver = _DRIVERS.get(parsed.get_backend_name())
    if driver is None:
        raise InvalidInput(problem_of(parsed))
    return parsed.set(drivername=f"{parsed.get_backend_name()}+{driver}")


class OutcomeUnknown(Exception):
    """The answer to a COMMIT was lost, and the database cannot be asked what became of it."""


class ForeignDatabase:
    """Another database, as this process reaches it."""

    def __init__(self, engine: Engine, name: str) -> None:
        """Raise `InvalidInput` for a database that transactions cannot be had on."""
        problem = problem_of(engine.url)
        if problem is not None:
            message = f"database {name!r}: {problem}"
            raise InvalidInput(message)
        self.engine = engine
        self.name = name
        self.taped = TapedEngine(engine)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A transaction of one key, and what it is told as."""

    database: ForeignDatabase
    row: Mapping[str, Any]
    """Of the journal: digest, key, thread."""
    ends_at: float
    """When its time is over, by this process's monotonic clock."""
    what: str

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()


class _Opened:
    """A transaction on another database in which the row of its key is inserted."""

    def __init__(self, entry: _Entry) -> None:
        """Raise the driver's error, or SQLAlchemy's, when that does not succeed."""
        engine = entry.database.engine
        self.dialect: Any = engine.dialect
        self._connection = engine.connect()
        try:
            driver: Any = self._connection.connection.dbapi_connection
            self.driver = driver
            self.cursor = self.driver.cursor()
            if self._commits_each_statement:
                self.cursor.execute("BEGIN")
            if self.dialect.name == "postgresql":
                self.cursor.execute(time_limits(entry.seconds_left))
            _INSERT.execute(self.cursor, self.dialect, entry.row)
        except BaseException:
            self.undo()
            raise

    @property
    def _commits_each_statement(self) -> bool:
        if self.dialect.name == "postgresql":
            return bool(self.driver.autocommit)
        return self.driver.isolation_level is None

    def commit(self) -> None:
        if self._commits_each_statement:
            self.cursor.execute("COMMIT")
        else:
            self.driver.commit()

    def undo(self) -> None:
        """Roll back and give the connection back."""
        try:
            if self._commits_each_statement:
                self.cursor.execute("ROLLBACK")
            else:
                self.driver.rollback()
        except Exception:  # noqa: BLE001  the connection may be what failed; closing it undoes as much
            self._connection.invalidate()
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        with contextlib.suppress(Exception):  # as it is with a connection that is lost
            self.cursor.close()
        with contextlib.suppress(Exception):
            self._connection.close()


def _enter(entry: _Entry) -> _Opened | bytes:
    """Return a transaction with the key inserted, or the tape of one that was committed under it.

    Waits for another attempt that is under way. Raises `JournalMissing`, `NodeTimeout`, and what SQLAlchemy or the
    driver raises when the database cannot be reached.
    """
    error_class = entry.database.engine.dialect.loaded_dbapi.Error
    while True:
        try:
            return _Opened(entry)
        except error_class as error:
            found = _in_the_way(entry, error)
        if found is not None:
            return found
        if entry.seconds_left <= 0:
            message = f"{entry.what} was not begun: the node's time is over"
            raise NodeTimeout(message)
        time.sleep(_PAUSE_SECONDS)


def _in_the_way(entry: _Entry, error: Any) -> bytes | None:
    """Return the tape when an insert failed because of it; None when the insert is to be tried again."""
    dialect, code, text = entry.database.engine.dialect, getattr(error, "pgcode", None), str(error)
    if code == _NO_TABLE or f"no such table: {journal.name}" in text:
        message = (
            f"database {entry.database.name!r} has no table {journal.name}, in which its transactions are recorded: "
            "run keepstep db install-journal on it"
        )
        raise JournalMissing(message) from None
    if isinstance(error, dialect.loaded_dbapi.IntegrityError):
        return _tape_of(entry)
    if code in _TIMED_OUT:
        message = f"{entry.what} was not begun: another attempt at it did not end while the node had time"
        raise NodeTimeout(message) from None
    if code in _CONTENTION or (dialect.name == "sqlite" and "locked" in text):
        return None
    raise error


def _tape_of(entry: _Entry) -> bytes | None:
    with entry.database.engine.connect() as connection:
        of_key = select(journal.c.tape).where(journal.c.digest == entry.row["digest"])
        tape = connection.execute(of_key).scalar_one_or_none()
    return None if tape is None else bytes(tape)


class ForeignTransaction:
    """A transaction under way on another database; or, when it was committed before, its tape."""

    connection: Connection
    """What the user has."""

    def __init__(
        self, database: ForeignDatabase, key: str, thread: str, *, seconds: float, bytes_max: int, what: str
    ) -> None:
        """Begin it, after waiting for another attempt at it that is under way.

        `key` is its idempotency key, `thread` the thread's id, `seconds` are left for it, `bytes_max` bounds its tape,
        `what` names it in errors. Raises as `_enter` does.
        """
        digest = hashlib.blake2b(key.encode(), digest_size=32).hexdigest()
        row = {"digest": digest, "key": key, "thread": thread}
        self._entry = _Entry(database, row, time.monotonic() + seconds, what)
        self.stored: bytes | None = None
        """The tape of one that was committed before; then there is no connection."""
        entered = _enter(self._entry)
        if isinstance(entered, bytes):
            self.stored = entered
            return
        self._opened = entered
        self.tape = Tape(bytes_max)
        self.taped = Recording(entered.driver, entered.dialect, self.tape, what)
        try:
            self.connection = database.taped.connection(self.taped)
        except BaseException:
            entered.undo()
            raise

    def commit(self, stored: bytes) -> None:
        """Commit it with its tape; a COMMIT whose answer is lost is looked up, and returns when it has landed.

        Raises `OutcomeUnknown` when that cannot be asked, and what the database says when nothing is committed.
        """
        opened = self._opened
        driver_error = opened.dialect.loaded_dbapi.Error
        try:
            _RECORD.execute(opened.cursor, opened.dialect, {**self._entry.row, "tape": stored})
            reach("inside_transaction", self._entry.row["key"])
        except BaseException as error:
            self.undo()
            if getattr(error, "pgcode", None) == _FAILED_BEFORE:
                raise failed_before(self._entry.what) from None
            raise
        try:
            opened.commit()
        except driver_error as error:
            self.undo()
            if not self._has_landed():
                raise error from None
        else:
            self._leave()
            opened.close()

    def undo(self) -> None:
        """Roll it back."""
        self._leave()
        self._opened.undo()

    def _leave(self) -> None:
        self.taped.is_over = True
        with contextlib.suppress(Exception):  # SQLAlchemy's own books; the connection itself is given back apart
            self.connection.close()

    def _has_landed(self) -> bool:
        """Ask under the same key, whose holder has ended then."""
        try:
            entered = _enter(self._entry)
        except Exception as error:
            raise OutcomeUnknown(type(error).__name__) from error
        if isinstance(entered, _Opened):
            entered.undo()
        return isinstance(entered, bytes)
