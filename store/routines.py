"""The statements of the hot path, as functions of a PostgreSQL database.

PostgreSQL parses and plans a statement each time it is sent, which for claim and commit takes longer than running them.
Prepared statements would be a session's state, and PgBouncer hands a session around; a function belongs to the schema,
and each server process keeps its plan.

A function's body is the Core statement as it stands in the code, and its name ends with a digest of the body, so that
workers of two releases on one database each call their own. `keepstep db upgrade` creates those that are missing. Where
one is missing, because only a statement and not the schema is new, the statement itself is sent: the same, but slower.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from psycopg2.extensions import adapt
from sqlalchemy import Connection, Dialect
from sqlalchemy.sql.base import Executable

from keepstep.store.statements import Statement

_PARAMETER = re.compile(r"%\((\w+)\)s")
_IS_THERE = "SELECT coalesce(has_function_privilege(to_regproc(%(name)s), 'EXECUTE'), false)"


class _Definition(NamedTuple):
    name: str
    create: str
    call: str


class Routine(Statement):
    """A statement that PostgreSQL runs as a function where `install` has created it.

    `parameters`: the PostgreSQL type of each parameter.
    """

    def __init__(self, name: str, build: Callable[[str], Executable], parameters: Mapping[str, str]) -> None:
        super().__init__(build)
        self._name = name
        self._parameters = parameters
        self._definition: _Definition | None = None
        # By dialect object: each engine has its own, so this is by database and by process.
        self._is_there: WeakKeyDictionary[Dialect, bool] = WeakKeyDictionary()

    def execute(self, cursor: Any, dialect: Dialect, params: Mapping[str, Any]) -> None:
        """Run it on a DBAPI cursor."""
        if dialect.name == "postgresql" and self._known(cursor, dialect):
            cursor.execute(self.definition(dialect).call, params)
        else:
            super().execute(cursor, dialect, params)

    def _known(self, cursor: Any, dialect: Dialect) -> bool:
        known = self._is_there.get(dialect)
        if known is None:
            cursor.execute(_IS_THERE, {"name": self.definition(dialect).name})
            known = self._is_there[dialect] = bool(cursor.fetchone()[0])
        return known

    def definition(self, dialect: Dialect) -> _Definition:
        """Return the function's name, the statement that creates it and the one that calls it."""
        if self._definition is None:
            self._definition = self._defined(dialect)
        return self._definition

    def _defined(self, dialect: Dialect) -> _Definition:
        text, _, constants = self.prepared(dialect)
        used: list[str] = []

        def inlined(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in constants:
                return "NULL" if constants[name] is None else adapt(constants[name]).getquoted().decode()
            if name not in used:
                used.append(name)
            return f"p_{name}"

        body = _PARAMETER.sub(inlined, text)
        columns = enumerate(self._build("postgresql").selected_columns)  # type: ignore[attr-defined]  # all are selects
        result = ", ".join(f"r{number} {column.type.compile(dialect)}" for number, column in columns)
        takes = ", ".join(f"p_{name} {self._parameters[name]}" for name in used)
        head = f"({takes}) RETURNS TABLE ({result}) LANGUAGE plpgsql"
        # The planner must not find a table small once and read it from end to end for as long as the plan is kept.
        head += " SET enable_seqscan = off"
        name = f"keepstep_{self._name}_{hashlib.sha256((head + body).encode()).hexdigest()[:12]}"
        create = f"CREATE FUNCTION {name}{head} AS $keepstep$\nBEGIN\nRETURN QUERY {body};\nEND\n$keepstep$"
        given = ", ".join(f"%({name})s" for name in used)
        return _Definition(name, create, f"SELECT * FROM {name}({given})")  # noqa: S608  names of our own making


def install(connection: Connection, routines: tuple[Routine, ...]) -> None:
    """Create the functions that the database does not have yet."""
    for routine in routines:
        defined = routine.definition(connection.dialect)
        if not connection.exec_driver_sql(_IS_THERE, {"name": defined.name}).scalar():
            connection.exec_driver_sql(defined.create)
