"""The schema's version: brought up to date on request, checked before a worker starts."""

from __future__ import annotations

import contextlib
import functools
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.exc import OperationalError

from keepstep.errors import DatabaseUnavailable, SchemaMismatch
from keepstep.store import checkpoints, claims
from keepstep.store.engine import Store
from keepstep.store.routines import install

if TYPE_CHECKING:
    from alembic.config import Config

_VERSION_TABLE = "keepstep_schema_version"
# Two processes that upgrade at once take turns: the second finds nothing left to do.
_LOCK_KEY = 0x6B656570737465
_SET_UP_SECONDS = 30.0
_PATIENT: dict[str, dict[str, Any]] = {"postgresql": {}, "sqlite": {"timeout": 60.0}}


class SchemaState(NamedTuple):
    """The revision a database has and the one this release needs; None: no schema at all."""

    current: str | None
    needed: str

    @property
    def is_current(self) -> bool:
        """Whether this release can work with the database."""
        return self.current == self.needed


def _config(connection: Connection | None = None) -> Config:
    from alembic.config import Config  # noqa: PLC0415  only upgrades need it; every worker and command looks at the schema

    config = Config()
    config.set_main_option("script_location", str(_folder()))
    config.set_main_option("path_separator", "os")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def _folder() -> Any:
    return resources.files("keepstep.store") / "migrations"


@functools.cache
def revisions() -> tuple[str, ...]:
    """Return the revisions that this release knows, the oldest first: the name of each one's file begins with it."""
    names = (file.name for file in (_folder() / "versions").iterdir())
    return tuple(sorted(name.partition("_")[0] for name in names if name[:1].isdigit() and name.endswith(".py")))


def upgrade(store: Store) -> SchemaState:
    """Bring the database's schema to this release's revision; return what it was and what it is needed to be.

    Running it again, or from two processes at once, is harmless. Raises `SchemaMismatch` for a database that a newer
    release has upgraded, `DatabaseUnavailable` when it cannot be reached.
    """
    # The store's own connections are in autocommit; a migration is one transaction.
    engine = store.engine if store.in_memory else create_engine(store.url, connect_args=_PATIENT[store.dialect])
    try:
        with engine.connect() as connection:
            if store.dialect == "postgresql":
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
                connection.commit()
            elif not store.in_memory:
                # Until the end nobody sees a schema that is half-way: a worker that did would refuse to start.
                connection.exec_driver_sql("BEGIN EXCLUSIVE")
            state = _read(connection)
            if store.dialect == "postgresql":
                connection.rollback()
            if not state.is_current:
                _refuse_newer(store, state)
                from alembic import command  # noqa: PLC0415  as above

                command.upgrade(_config(connection), "head")
                connection.commit()
            if store.dialect == "postgresql":
                install(connection, (*claims.ROUTINES, *checkpoints.ROUTINES))
                connection.commit()
            return state
    except OperationalError as error:
        reason = str(error.orig).strip().splitlines()[0][:200]
        message = f"database {store.shown}: {reason}"
        raise DatabaseUnavailable(message) from None
    finally:
        if not store.in_memory:
            engine.dispose()


def state(store: Store) -> SchemaState:
    """Return the revision the database has and the one this release needs."""
    try:
        with store.engine.connect() as connection:
            return _read(connection)
    except OperationalError as error:
        reason = str(error.orig).strip().splitlines()[0][:200]
        message = f"database {store.shown}: {reason}"
        raise DatabaseUnavailable(message) from None


def _read(connection: Connection) -> SchemaState:
    needed = revisions()[-1]
    if not inspect(connection).has_table(_VERSION_TABLE):
        return SchemaState(None, needed)
    return SchemaState(connection.execute(text(f"SELECT version_num FROM {_VERSION_TABLE}")).scalar(), needed)  # noqa: S608  our own name


def _refuse_newer(store: Store, found: SchemaState) -> None:
    if found.current is not None and found.current not in revisions():
        message = (
            f"database {store.shown} has schema {found.current}, which this release does not know: it was upgraded by "
            "a newer release; run that release here"
        )
        raise SchemaMismatch(message)


def set_up_in_memory(store: Store) -> None:
    """Give an empty in-memory database the schema: all migrations take longer than a run in process does."""
    with contextlib.closing(store.engine.raw_connection()) as connection:
        connection.driver_connection.deserialize(_in_memory())  # type: ignore[union-attr]  # it is open


@functools.cache
def _in_memory() -> bytes:
    template = Store.open("sqlite://")
    try:
        upgrade(template)
        with contextlib.closing(template.engine.raw_connection()) as connection:
            data: bytes = connection.driver_connection.serialize()  # type: ignore[union-attr]  # as above
            return data
    finally:
        template.dispose()


def check(store: Store) -> None:
    """Raise `SchemaMismatch`, saying what to do, unless this release can work with the database."""
    found = state(store)
    if found.is_current:
        return
    _refuse_newer(store, found)
    has = "no Keepstep schema" if found.current is None else f"schema {found.current}"
    message = f"database {store.shown} has {has}, this release needs {found.needed}: run 'keepstep db upgrade'"
    raise SchemaMismatch(message)


def prepare(store: Store) -> None:
    """Check the schema before work starts; an empty SQLite file, which nobody else can be using yet, is set up."""
    # SQLite does not wait for who sets the file up when a connection turns its write-ahead log on: it refuses at once.
    if store.dialect == "sqlite" and store.patiently(lambda: state(store), seconds=_SET_UP_SECONDS).current is None:
        upgrade(store)
        return
    check(store)
