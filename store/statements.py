"""Statements built once from SQLAlchemy Core, compiled once per dialect and run on a bare cursor.

On two cores Python is the limit, not fsync: building and compiling a statement for each call costs several times the
statement itself. Everything Keepstep runs goes through here, so the slow way is not there to be taken by accident.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import BindParameter, ColumnElement, Dialect, Float, Integer, bindparam, or_, select
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

if TYPE_CHECKING:
    from sqlalchemy.sql.base import Executable
    from sqlalchemy.sql.compiler import SQLCompiler

Row = tuple[Any, ...]


class db_now(FunctionElement[float]):  # noqa: N801  a SQL function, named like one
    """The database's clock, in seconds since 1970: it moves within a transaction."""

    type = Float(53)
    inherit_cache = True


@compiles(db_now, "postgresql")
def _postgresql_now(_element: object, _compiler: object, **_options: object) -> str:
    return "extract(epoch from clock_timestamp())::float8"


@compiles(db_now, "sqlite")
def _sqlite_now(_element: object, _compiler: object, **_options: object) -> str:
    return "keepstep_now()"


def now_once() -> ColumnElement[float]:
    """The database's clock as a statement first sees it: an index is read by it, and not by a time that moves."""
    return select(db_now()).scalar_subquery()


class contains(FunctionElement[int]):  # noqa: N801  a SQL function, named like one
    """The 1-based position of the second text in the first; 0 when it is not there."""

    type = Integer()
    inherit_cache = True


@compiles(contains, "postgresql")
def _postgresql_contains(element: FunctionElement[int], compiler: SQLCompiler, **options: object) -> str:
    return f"strpos({compiler.process(element.clauses, **options)})"


@compiles(contains, "sqlite")
def _sqlite_contains(element: FunctionElement[int], compiler: SQLCompiler, **options: object) -> str:
    return f"instr({compiler.process(element.clauses, **options)})"


def param(name: str) -> Any:
    """Return the bind parameter `name`."""
    return bindparam(name)


def one_of(column: ColumnElement[str], values: Sequence[str]) -> ColumnElement[bool]:
    """Return the condition that a column has one of a few constant values.

    Spelled out, because Core completes an `IN` list only at each execution.
    """
    return or_(*(column == value for value in values))


class _SpelledOut(SQLiteCompiler):
    """Writes a statement's constants into its text.

    SQLite plans a statement before it knows its parameters: an index of what is `ready` is no use to it for
    `status = ?`, and it plans again at each execution, to see whether it is this time.
    """

    def visit_bindparam(self, bindparam: BindParameter[Any], *args: Any, **options: Any) -> str:
        if not bindparam.required and isinstance(bindparam.value, (str, int, float)):
            options["literal_binds"] = True
        text: str = super().visit_bindparam(bindparam, *args, **options)  # type: ignore[no-untyped-call]  # as it is there
        return text


def _compiling(dialect: Dialect) -> Dialect:
    if dialect.name != "sqlite":
        return dialect
    spelling = copy.copy(dialect)
    spelling.statement_compiler = _SpelledOut
    return spelling


class Statement:
    """One Core statement, ready to run on either dialect.

    `build` is called once per dialect name, at first use.
    """

    def __init__(self, build: Callable[[str], Executable]) -> None:
        self._build = build
        self._compiled: dict[str, tuple[str, tuple[str, ...] | None, dict[str, Any]]] = {}

    def prepared(self, dialect: Dialect) -> tuple[str, tuple[str, ...] | None, dict[str, Any]]:
        """Return the SQL text, the order of its positional parameters (None: by name), and its constants."""
        found = self._compiled.get(dialect.name)
        if found is None:
            statement = self._build(dialect.name)
            compiled = cast("SQLCompiler", statement.compile(dialect=_compiling(dialect)))  # type: ignore[attr-defined]
            order = tuple(compiled.positiontup) if compiled.positiontup is not None else None
            constants = {name: compiled.params[name] for bind, name in compiled.bind_names.items() if not bind.required}
            found = (compiled.string, order, constants)
            self._compiled[dialect.name] = found
        return found

    def execute(self, cursor: Any, dialect: Dialect, params: Mapping[str, Any]) -> None:
        """Run it on a DBAPI cursor."""
        text, order, constants = self.prepared(dialect)
        # A constant is named after its column; a parameter of that name belongs to another statement of the caller's.
        values = {**params, **constants} if constants else params
        cursor.execute(text, values if order is None else tuple(values[name] for name in order))
