"""A producer's outbox: starts that are written to a table in its own database, in its own transaction.

They are sent by a relay (`keepstep relay`, or a worker that is given the database) once that transaction has committed,
and not when it was rolled back. This file writes with whatever connection the producer has, and imports no driver.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping
from typing import Any

from keepstep.errors import InvalidInput, SchemaMismatch

TABLE = "keepstep_outbox"
_COLUMNS = ("id", "body", "created_at")
_MARKS = {
    "qmark": "?",
    "numeric": ":{number}",
    "numeric_dollar": "${number}",
    "named": ":{name}",
    "format": "%s",
    "pyformat": "%({name})s",
}
"""How a parameter is written in each of the styles of PEP 249."""
_INTRANS = 2
"""PostgreSQL's name for a connection that is in a transaction."""


def write(connection: Any, command_id: str, body: bytes) -> None:
    """Write a command to the outbox, in the transaction that `connection` is in.

    `connection`: a DB-API connection (sqlite3, psycopg2, psycopg, PyMySQL, …), a SQLAlchemy `Connection` or ORM
    `Session`, or Django's `connection`. Raises `InvalidInput` for anything else, and for a connection that commits each
    statement by itself; `SchemaMismatch` when the table is not there.
    """
    values = dict(zip(_COLUMNS, (command_id, body.decode(), time.time()), strict=True))
    try:
        _execute(connection, values)
    except InvalidInput:
        raise
    except Exception as error:
        if TABLE in str(error) and type(error).__name__ in {"OperationalError", "ProgrammingError", "UndefinedTable"}:
            message = f"the database has no table {TABLE}: keepstep db install-outbox URL makes it"
            raise SchemaMismatch(message) from error
        raise


def _execute(connection: Any, values: Mapping[str, object]) -> None:
    if hasattr(connection, "get_bind") and hasattr(connection, "connection"):  # a Session of SQLAlchemy's ORM
        connection = connection.connection()
    if hasattr(connection, "exec_driver_sql"):
        if _is_async(connection):
            message = "connection: an async connection cannot be written to; use run_sync"
            raise InvalidInput(message)
        if _is_autocommit_of_sqlalchemy(connection):
            raise _autocommit()
        connection.exec_driver_sql(*_statement(connection.dialect.paramstyle, values))
        return
    style = _style(connection)
    if _commits_by_itself(connection):
        raise _autocommit()
    cursor = connection.cursor()
    _refuse_async(cursor)
    try:
        _refuse_async(cursor.execute(*_statement(style, values)))
    finally:
        _refuse_async(cursor.close())


def _refuse_async(returned: object) -> None:
    """Raise `InvalidInput` for what an async driver returns: nothing has been written, and nobody would wait for it."""
    if inspect.isawaitable(returned):
        close = getattr(returned, "close", None)
        if inspect.iscoroutine(returned) and close is not None:
            close()
        message = "connection: an async connection cannot be written to; give a connection that is not"
        raise InvalidInput(message)


def _is_autocommit_of_sqlalchemy(connection: Any) -> bool:
    """Tell whether a SQLAlchemy connection commits each statement: by options, engine or driver."""
    chosen = connection.get_execution_options().get("isolation_level")
    if chosen is None:
        chosen = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return chosen == "AUTOCOMMIT" or _commits_by_itself(connection.connection)


def _is_async(connection: Any) -> bool:
    """Tell whether a SQLAlchemy connection is an async one."""
    return hasattr(connection, "run_sync")


def _is_django(connection: Any) -> bool:
    # `django.db.connection` itself is no connection but stands for the one of the thread.
    return any(kind.__module__.startswith(("django.db.", "django.utils.")) for kind in type(connection).__mro__)


def _style(connection: Any) -> str:
    """Return how a connection's statements write their parameters, as PEP 249 names it."""
    if not hasattr(connection, "cursor"):
        message = (
            f"connection: a {type(connection).__name__} is none that can be written to: give a DB-API connection, a "
            "SQLAlchemy Connection or Session, or Django's connection"
        )
        raise InvalidInput(message)
    if _is_django(connection):
        return "format"
    real = getattr(connection, "dbapi_connection", connection)  # of SQLAlchemy's raw_connection
    for kind in type(real).__mro__:
        module = sys.modules.get(kind.__module__.partition(".")[0])
        style = getattr(module, "paramstyle", None)
        if isinstance(style, str):
            return style
    message = f"connection: {type(connection).__name__} is of no module that follows PEP 249 (it has no paramstyle)"
    raise InvalidInput(message)


def _commits_by_itself(connection: Any) -> bool:
    """Tell whether what is written now would be committed at once, whatever becomes of the producer's own rows."""
    if _is_django(connection):
        return bool(connection.get_autocommit())  # False inside transaction.atomic()
    real = getattr(connection, "dbapi_connection", connection)
    if getattr(real, "in_transaction", False) is True:  # sqlite3, whatever its mode
        return False
    info = getattr(real, "info", None)
    if getattr(info, "transaction_status", None) == _INTRANS:  # psycopg2 and psycopg
        return False
    mode = getattr(real, "autocommit", None)
    if callable(mode) and hasattr(real, "get_autocommit"):  # PyMySQL and mysqlclient
        return bool(real.get_autocommit())
    if any(kind.__module__ == "sqlite3" for kind in type(real).__mro__) and mode is not False:
        return mode is True or real.isolation_level is None
    return mode is True


def _autocommit() -> InvalidInput:
    message = (
        "connection: it commits each statement by itself, so the start would be sent even if your own rows were rolled "
        "back; begin a transaction first"
    )
    return InvalidInput(message)


def _statement(style: str, values: Mapping[str, object]) -> tuple[str, Any]:
    if style not in _MARKS:
        message = f"connection: the parameter style {style!r} is not known"
        raise InvalidInput(message)
    places = ", ".join(_MARKS[style].format(name=name, number=number) for number, name in enumerate(values, start=1))
    text = f"INSERT INTO {TABLE} ({', '.join(values)}) VALUES ({places})"  # noqa: S608  names of ours, values bound
    return text, dict(values) if style in {"named", "pyformat"} else tuple(values.values())
