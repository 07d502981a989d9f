"""Connections with a tape: one that records what a database answers, and one that answers from a tape alone.

Both are small PEP 249 connections which SQLAlchemy uses like any other, so that Core, the ORM and plain SQL behave in
them as they do elsewhere. Neither ends its transaction: the block that it was made for does.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import psycopg2.errors
from psycopg2.extensions import TRANSACTION_STATUS_IDLE
from sqlalchemy import Connection, Dialect, Engine
from sqlalchemy.pool import NullPool

from keepstep.errors import TransactionRefused
from keepstep.store.tapes import Answer, Failure, Player, Tape, digest_of, exactly, shown

_FETCHED_AT_ONCE = 500
_KINDS = (
    "IntegrityError",
    "DataError",
    "OperationalError",
    "ProgrammingError",
    "InternalError",
    "NotSupportedError",
    "DatabaseError",
    "InterfaceError",
    "Error",
)
_FIRST_WORDS = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*(\w+)((?:\s+\w+)*)", re.DOTALL)
_COMMENT_OR_QUOTED = re.compile(
    r"""(--[^\n]*|/\*.*?\*/|\*/)|\b[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\2\$""",
    re.DOTALL,
)
_ENDS = {"COMMIT", "END", "ABORT", "BEGIN", "START"}


class Taped:
    """What the recording and the playing connection have in common. `what` names the transaction in errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.refused: TransactionRefused | None = None
        """Why the block must not be committed, whoever caught it."""
        self.is_over = False
        self.closed = 0
        self.notices: list[str] = []

    def cursor(self, *_: Any, **__: Any) -> Any:
        """Return a cursor; a named one would leave its rows at the server, and they go on the tape."""
        raise NotImplementedError

    def commit(self) -> None:
        """Refuse: the block commits at its end."""
        if not self.is_over:
            self.refuse("commit()", "it commits when the block ends")

    def rollback(self) -> None:
        """Let the block not be committed. Nothing is raised: a session rolls back when something else went wrong."""
        if not self.is_over and self.refused is None:
            message = (
                f"{self.what} was rolled back inside its block, and so is not committed: raise an exception out of the "
                "block, or undo a part of it with conn.begin_nested()"
            )
            self.refused = TransactionRefused(message)

    def close(self) -> None:
        """Do nothing: whose connection it is gives it back."""

    def refuse(self, asked: str, instead: str) -> NoReturn:
        """Raise `TransactionRefused`, and let the block not be committed."""
        self.refused = TransactionRefused(f"{self.what}: {asked} is not for the block to say: {instead}")
        raise self.refused

    def check(self, statement: str) -> None:
        """Raise `TransactionRefused` for a statement that would end the transaction, or come after its end."""
        if self.is_over:
            message = f"{self.what} has ended; nothing was run"
            raise TransactionRefused(message)
        if self.refused is not None:
            raise self.refused
        ending = _ending(statement)
        if ending is not None:
            self.refuse(ending, "the transaction is the block's; conn.begin_nested() makes savepoints")


_PREPARED = ["PREPARE", "TRANSACTION"]


def _ending(text: str) -> str | None:
    """Return the first word of a statement among several that ends the transaction or begins one; None: none does.

    One that ended it in the middle and began another could not be told afterwards from one that did neither.
    """
    parts = [text]
    if ";" in text:
        parts = _COMMENT_OR_QUOTED.sub(lambda found: " " if found[1] else " _ ", text).split(";")
    is_definition = False
    for part in parts:
        words = _FIRST_WORDS.match(part)
        first, rest = (words[1].upper(), words[2].upper().split()) if words else ("", [])
        is_definition = is_definition or first == "CREATE"
        if is_definition and first == "END":
            continue  # of a trigger's or a function's body
        if first in _ENDS or (first == "ROLLBACK" and "TO" not in rest) or [first, *rest[:1]] == _PREPARED:
            return first
    return None


class _Rows:
    """The part of a cursor that gives out rows which are there already."""

    arraysize = 1

    def __init__(self, connection: Taped) -> None:
        self.connection: Any = connection
        self._answer = Answer(b"")
        self._next = 0

    def _give(self, answer: Answer) -> None:
        self._answer, self._next = answer, 0

    @property
    def description(self) -> list[tuple[Any, ...]] | None:
        """(name, type code, …) of each column."""
        columns = self._answer.columns
        return None if columns is None else [(name, code, None, None, None, None, None) for name, code in columns]

    @property
    def rowcount(self) -> int:
        """As the driver said."""
        return self._answer.rowcount

    @property
    def lastrowid(self) -> int | None:
        """As the driver said."""
        return self._answer.lastrowid

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row."""
        found = self.fetchmany(1)
        return found[0] if found else None

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        """Return the next rows."""
        first, self._next = self._next, self._next + (self.arraysize if size is None else size)
        return list(self._answer.rows[first : self._next])

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the rows that are left."""
        first, self._next = self._next, len(self._answer.rows)
        return list(self._answer.rows[first:])

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.fetchall())

    def __getattr__(self, name: str) -> Any:
        message = f"cursor.{name} is not recorded, so a transaction's block cannot use it: use execute"
        raise AttributeError(message)

    def setinputsizes(self, *_: Any) -> None:
        """Do nothing, as PEP 249 allows."""

    def setoutputsize(self, *_: Any) -> None:
        """Do nothing, as PEP 249 allows."""


# --- recording ---


class Recording(Taped):
    """A connection to a database whose answers are recorded."""

    def __init__(self, driver: Any, dialect: Dialect, tape: Tape, what: str) -> None:
        """`driver` is the driver's connection, in a transaction that somebody else ends."""
        super().__init__(what)
        self._driver = driver
        self._dialect = dialect
        self.tape = tape

    def cursor(self, *_: Any, **__: Any) -> Any:
        """Return a cursor on the database."""
        return _RecordingCursor(self, self._driver.cursor(), self._dialect)

    def check_open(self, statement: str) -> None:
        """Raise `TransactionRefused` when a statement, in whatever disguise, has ended the transaction."""
        driver = self._driver
        if self._dialect.name == "postgresql":
            is_open = driver.closed or driver.get_transaction_status() != TRANSACTION_STATUS_IDLE
        else:
            is_open = driver.in_transaction
        if not is_open:
            self.refuse(f"{shown(statement)!r}", "it has ended the transaction, and may have committed a part of it")


class _RecordingCursor(_Rows):
    def __init__(self, connection: Recording, cursor: Any, dialect: Dialect) -> None:
        super().__init__(connection)
        self._tape = connection.tape
        self._cursor = cursor
        self._dialect = dialect

    def execute(self, statement: str, parameters: Any = None) -> None:
        given = () if parameters is None else (parameters,)
        self._run(statement, parameters, lambda: self._cursor.execute(statement, *given))

    def executemany(self, statement: str, parameters: Sequence[Any]) -> None:
        self._run(statement, parameters, lambda: self._cursor.executemany(statement, parameters))

    def close(self) -> None:
        self._cursor.close()

    def _run(self, statement: str, parameters: Any, run: Callable[[], object]) -> None:
        self.connection.check(statement)
        digest = digest_of(statement, parameters)
        try:
            run()
            answer = self._answered(digest)
        except _error_class(self._dialect) as error:
            self._tape.record(Answer(digest, failure=_failure_of(error, self._dialect)))
            raise
        self.connection.check_open(statement)
        self._tape.record(answer)
        self._give(answer)

    def _answered(self, digest: bytes) -> Answer:
        cursor = self._cursor
        columns, rows = None, []
        if cursor.description is not None:
            columns = [(str(column[0]), column[1]) for column in cursor.description]
            while fetched := cursor.fetchmany(_FETCHED_AT_ONCE):
                fetched = [exactly(row) for row in fetched]
                self._tape.weigh(fetched)
                rows += fetched
        return Answer(digest, columns, rows, int(cursor.rowcount), cursor.lastrowid)


def _error_class(dialect: Dialect) -> type[Exception]:
    found: type[Exception] = dialect.loaded_dbapi.Error
    return found


def _failure_of(error: Exception, dialect: Dialect) -> Failure:
    kind = next(name for name in _KINDS if isinstance(error, getattr(dialect.loaded_dbapi, name)))
    code = getattr(error, "pgcode", None) or getattr(error, "sqlite_errorname", None)
    return Failure(kind, str(error), code)


# --- playing ---


class Playing(Taped):
    """A connection to nothing but a tape."""

    def __init__(self, dialect: Dialect, player: Player, what: str) -> None:
        super().__init__(what)
        self._dialect = dialect
        self._player = player

    def cursor(self, *_: Any, **__: Any) -> Any:
        """Return a cursor on the tape."""
        return _PlayingCursor(self, self._player, self._dialect)


class _PlayingCursor(_Rows):
    def __init__(self, connection: Playing, player: Player, dialect: Dialect) -> None:
        super().__init__(connection)
        self._player = player
        self._dialect = dialect

    def execute(self, statement: str, parameters: Any = None) -> None:
        self.connection.check(statement)
        answer = self._player.answer(statement, parameters)
        if answer.failure is not None:
            raise _raised(answer.failure, self._dialect)
        self._give(answer)

    executemany = execute

    def close(self) -> None:
        pass


def _raised(failure: Failure, dialect: Dialect) -> Exception:
    """Return a recorded failure as the driver raised it."""
    kind: type[Exception] = getattr(dialect.loaded_dbapi, failure.kind)
    if dialect.name != "postgresql":
        error = kind(failure.text)
        if failure.code is not None:
            error.sqlite_errorname = failure.code  # type: ignore[attr-defined]  # as sqlite3 sets it
        return error
    if failure.code is None:
        return kind(failure.text)
    with contextlib.suppress(KeyError):  # newer than this driver: its PEP 249 class says enough
        kind = psycopg2.errors.lookup(failure.code)
    found = kind(failure.text)
    # What pickling restores; the attribute itself cannot be written.
    found.__setstate__({"pgcode": failure.code, "pgerror": failure.text})
    return found


# --- SQLAlchemy's view of them ---


class TapedEngine:
    """One engine for all taped connections of a database, so that statements are compiled once. Safe in threads."""

    def __init__(self, like: Engine) -> None:
        """`like` is the engine whose dialect and options these connections have; it is not connected."""
        self.dialect = like.dialect
        self._given = threading.local()
        pool = NullPool(self._taken, reset_on_return=None, dialect=like.dialect)
        # Parameters are values of the business; an error that quotes them would be stored with the thread.
        self._engine = Engine(pool, like.dialect, like.url, hide_parameters=True)
        self._engine.update_execution_options(**like.get_execution_options())

    def _taken(self) -> Any:
        found = getattr(self._given, "connection", None)
        if found is None:
            message = "conn.engine has no other connection than conn: use conn, or an engine of your own"
            raise TransactionRefused(message)
        return found

    def connection(self, taped: Taped) -> Connection:
        """Return a SQLAlchemy connection over a taped one, in a transaction that it cannot end."""
        self._given.connection = taped
        try:
            found = self._engine.connect()
        finally:
            del self._given.connection
        found.begin()
        return found
