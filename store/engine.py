"""The database: connections, transactions, time, and what to do when it goes away.

No connection is held between two calls, so a node that runs for an hour costs the pool nothing, and PgBouncer in
transaction mode works. PostgreSQL connections are in autocommit: a single statement is one round trip, and a
transaction says BEGIN and COMMIT itself.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psycopg2
import psycopg2.extensions
import structlog
from sqlalchemy import create_engine, event, make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from keepstep.errors import DatabaseUnavailable, DuplicateRow, InvalidSettings
from keepstep.store.pool import Pool, PoolExhausted
from keepstep.store.statements import Row, Statement
from keepstep.store.taped import TapedEngine

T = TypeVar("T")
log = structlog.get_logger("keepstep.store")

_BUSY_SECONDS = 20.0
_CONNECT_SECONDS = 5
# Shutting down, out of resources, a standby, a time limit of the server's: it may be well again in a moment.
_AWAY = ("57P", "57014", "53", "58", "25006")
_SQLITE_AWAY = ("locked", "full", "disk I/O", "readonly", "unable to open")
_UNIQUE_VIOLATION = "23505"
# A conflict between transactions, not a failure of the database: the same transaction succeeds when run again.
_CONTENTION = ("40001", "40P01", "55P03")


def _bytes(value: Any, cursor: Any) -> bytes | None:
    return None if value is None else bytes(psycopg2.BINARY(value, cursor))


# The driver gives memory views; everything here means bytes.
_BYTES = psycopg2.extensions.new_type(psycopg2.BINARY.values, "BYTES", _bytes)


def _prepare_postgresql(connection: Any, _record: object) -> None:
    psycopg2.extensions.register_type(_BYTES, connection)


class Transaction:
    """A transaction under way: runs statements on one connection, in order."""

    def __init__(self, store: Store, cursor: Any) -> None:
        self._dialect = store.engine.dialect
        self.postgresql = store.dialect == "postgresql"
        self.cursor = cursor

    def rows(self, statement: Statement, params: Mapping[str, Any]) -> list[Row]:
        """Run a statement and return its rows."""
        statement.execute(self.cursor, self._dialect, params)
        found: list[Row] = self.cursor.fetchall()
        return found

    def row(self, statement: Statement, params: Mapping[str, Any]) -> Row | None:
        """Run a statement and return its first row, if any."""
        found = self.rows(statement, params)
        return found[0] if found else None

    def run(self, statement: Statement, params: Mapping[str, Any]) -> int:
        """Run a statement without a result; return the number of rows it touched."""
        statement.execute(self.cursor, self._dialect, params)
        return int(self.cursor.rowcount)


class Loan:
    """A connection that is lent for longer than one call. It is given back by `end`, whatever became of it."""

    def __init__(self, store: Store, pool: Pool, connection: Any, held: contextlib.ExitStack) -> None:
        self.driver = connection.dbapi_connection
        self._store = store
        self._pool = pool
        self._connection = connection
        self._held = held
        self._broken = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """Give the driver's connection, and say what went wrong as `Store.transaction` does."""
        try:
            yield self.driver
        except (psycopg2.Error, sqlite3.Error) as error:
            self._broken = self._broken or self._store._is_broken(error, self._connection)  # noqa: SLF001  of this module
            cause = self._store._classified(error, broken=self._broken)  # noqa: SLF001  of this module
            if cause is None:
                raise
            raise cause from error

    @property
    def is_broken(self) -> bool:
        """Whether the connection is lost, and what was done on it undone by the database."""
        return self._broken or bool(getattr(self.driver, "closed", False))

    def end(self, *, broken: bool = False) -> None:
        """Give the connection back; `broken`: it is not to be used again."""
        self._pool.give(self._connection, broken=broken or self.is_broken)
        self._held.close()


class Store:
    """One database, as this process reaches it. Make one per process: never share it across a fork."""

    def __init__(self, url: URL, *, pool_size: int, clock: Callable[[], float]) -> None:
        self.url = url
        self.dialect = url.get_backend_name()
        self.clock = clock
        self.in_memory = self.dialect == "sqlite" and url.database in {None, "", ":memory:"}
        # One in-memory database has one connection; its transactions queue up here instead of in SQLite.
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if self.in_memory else contextlib.nullcontext()
        )
        options: dict[str, Any] = {"poolclass": StaticPool}
        if not self.in_memory:
            # Nothing to reset: what is closed here is often broken, and a reset that fails is logged at length.
            options = {"poolclass": NullPool, "pool_reset_on_return": None}
        if self.dialect == "sqlite":
            options["connect_args"] = {"isolation_level": None, "timeout": _BUSY_SECONDS, "check_same_thread": False}
        else:
            options["isolation_level"] = "AUTOCOMMIT"
            options["connect_args"] = {"connect_timeout": _CONNECT_SECONDS, "application_name": "keepstep"}
        self.engine = create_engine(url, **options)
        prepare = self._prepare_sqlite if self.dialect == "sqlite" else _prepare_postgresql
        event.listen(self.engine, "connect", prepare)
        self._pool_size = pool_size
        self._pool = self._new_pool()
        # Of their own, so that no step waits for a connection that is lent for long.
        self._lent = self._new_pool()
        self._abandoned: list[Pool] = []

    @classmethod
    def open(cls, url: str, *, pool_size: int = 1, clock: Callable[[], float] = time.time) -> Store:
        """Return the store at a SQLAlchemy URL; nothing is connected yet.

        `pool_size` connections are kept and as many again made under pressure. `clock` is SQLite's clock (tests and
        in-process runs set it); PostgreSQL always uses its own. Raises `InvalidSettings` for a URL that names no
        supported database.
        """
        try:
            parsed = make_url(url)
        except ArgumentError:
            message = "database: not a database URL; use sqlite:///file.db or postgresql+psycopg2://user@host/name"
            raise InvalidSettings(message) from None
        backend = parsed.get_backend_name()
        if backend not in {"sqlite", "postgresql"}:
            message = f"database: {backend!r} is not supported; use sqlite:///file.db or postgresql+psycopg2://…"
            raise InvalidSettings(message)
        if backend == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg2")
        elif parsed.database and parsed.database != ":memory:":
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        return cls(parsed, pool_size=pool_size, clock=clock)

    def _prepare_sqlite(self, connection: sqlite3.Connection, _record: object) -> None:
        connection.create_function("keepstep_now", 0, self.clock)
        connection.execute("PRAGMA journal_mode=WAL")
        # A commit that was acknowledged survives a power cut, as on PostgreSQL.
        connection.execute(f"PRAGMA synchronous={'OFF' if self.in_memory else 'FULL'}")

    def _new_pool(self) -> Pool:
        # Connections are made and prepared by SQLAlchemy, and kept here.
        return Pool(self.engine.raw_connection, kept=self._pool_size, most=2 * self._pool_size)

    @property
    def connections_in_use(self) -> int:
        """How many connections are held by calls that are under way."""
        return self._pool.in_use + self._lent.in_use

    def dispose(self, *, close: bool = True) -> None:
        """Drop all connections; `close=False` in a child leaves the parent's sockets alone after a fork."""
        pools = self._pool, self._lent
        self._pool, self._lent = self._new_pool(), self._new_pool()
        for pool in pools:
            if close:
                pool.close()
            else:
                # Kept, not collected: what would be closed is the parent's.
                self._abandoned.append(pool)
        self.engine.dispose(close=close)

    # --- running statements ----------------------------------------------------------------------------------------

    def rows(self, statement: Statement, params: Mapping[str, Any]) -> list[Row]:
        """Run one statement as a transaction of its own and return its rows."""
        if self.dialect == "sqlite":
            with self.transaction() as transaction:
                return transaction.rows(statement, params)
        pool, connection = self._taken()
        broken = False
        try:
            cursor = connection.dbapi_connection.cursor()
            statement.execute(cursor, self.engine.dialect, params)
            found: list[Row] = cursor.fetchall()
            cursor.close()
        except psycopg2.Error as error:
            broken = self._is_broken(error, connection)
            cause = self._classified(error, broken=broken)
            if cause is None:
                raise
            raise cause from error
        else:
            return found
        finally:
            pool.give(connection, broken=broken)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Run several statements as one transaction: committed at the end of the block, undone when it raises."""
        with self._turn, self._connection() as connection:
            cursor = connection.cursor()
            cursor.execute("BEGIN IMMEDIATE" if self.dialect == "sqlite" else "BEGIN")
            try:
                yield Transaction(self, cursor)
                cursor.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(Exception):  # the connection may be what failed
                    cursor.execute("ROLLBACK")
                raise
            finally:
                cursor.close()

    def lend(self) -> Loan:
        """Lend a connection for longer than one call; an in-memory database serves nobody else meanwhile."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._turn)
            pool, connection = self._taken(self._lent)
            return Loan(self, pool, connection, held.pop_all())

    @functools.cached_property
    def taped(self) -> TapedEngine:
        """What makes a user's connections to this database."""
        return TapedEngine(self.engine)

    def _taken(self, lent: Pool | None = None) -> tuple[Pool, Any]:
        pool = self._pool if lent is None else lent
        try:
            return pool, pool.take()
        except (PoolExhausted, SQLAlchemyError, psycopg2.Error, sqlite3.Error) as error:
            raise self._unavailable(error) from error

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        pool, connection = self._taken()
        broken = False
        try:
            yield connection.dbapi_connection
        except (psycopg2.Error, sqlite3.Error) as error:
            broken = self._is_broken(error, connection)
            cause = self._classified(error, broken=broken)
            if cause is None:
                raise
            raise cause from error
        finally:
            pool.give(connection, broken=broken)

    def _is_broken(self, error: Exception, connection: Any) -> bool:
        if isinstance(error, sqlite3.Error):
            return False
        raw = connection.dbapi_connection
        return bool(raw.closed) or self.engine.dialect.is_disconnect(error, raw, None)  # type: ignore[arg-type]  # DBAPI error

    def _classified(self, error: Exception, *, broken: bool) -> DatabaseUnavailable | DuplicateRow | None:
        unique = isinstance(error, sqlite3.IntegrityError) and "UNIQUE" in str(error)
        if unique or getattr(error, "pgcode", None) == _UNIQUE_VIOLATION:
            return DuplicateRow()
        if isinstance(error, sqlite3.Error):
            away = isinstance(error, sqlite3.OperationalError) and any(sign in str(error) for sign in _SQLITE_AWAY)
            return self._unavailable(error) if away else None
        if getattr(error, "pgcode", None) in _CONTENTION:
            return self._unavailable(error)
        if broken:
            # What cut this connection has most likely cut its neighbours in the pool.
            self.dispose()
            return self._unavailable(error)
        code = getattr(error, "pgcode", None) or ""
        return self._unavailable(error) if code.startswith(_AWAY) else None

    def _unavailable(self, error: Exception) -> DatabaseUnavailable:
        if isinstance(error, PoolExhausted):
            reason = "every connection of the pool is in use"
        else:
            origin = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
            # The first line only: the rest of a driver's message may quote statements and their values.
            reason = str(origin).strip().splitlines()[0][:200] if str(origin).strip() else type(origin).__name__
        return DatabaseUnavailable(f"database {self.shown}: {reason}")

    @property
    def shown(self) -> str:
        """The database's URL without its password."""
        query = {
            name: "***" if "password" in name.lower() or "secret" in name.lower() else value
            for name, value in self.url.query.items()
        }
        return self.url.set(query=query).render_as_string(hide_password=True)

    def patiently(self, action: Callable[[], T], *, seconds: float = 60.0) -> T:
        """Run `action` again while the database is unavailable, up to `seconds`; it must be safe to run twice."""
        for attempt in Retrying(
            retry=retry_if_exception_type(DatabaseUnavailable),
            stop=stop_after_delay(seconds),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            before_sleep=lambda state: log.warning(
                "database_unavailable",
                attempt=state.attempt_number,
                reason=str(state.outcome.exception()) if state.outcome else "",
            ),
            reraise=True,
        ):
            with attempt:
                return action()
        raise DatabaseUnavailable  # pragma: no cover  Retrying re-raises before this


__all__ = ["Store", "Transaction"]
