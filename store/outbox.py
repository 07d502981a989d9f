"""A producer's outbox as a relay sees it: what is to be sent, in a database that is not the store's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from sqlalchemy import (
    Column,
    Engine,
    Float,
    Index,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    delete,
    func,
    inspect,
    select,
    update,
)
from sqlalchemy import exc as sqlalchemy_errors
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement

from keepstep import outbox as written
from keepstep.errors import DatabaseUnavailable, InvalidSettings, SchemaMismatch

metadata = MetaData()
outbox = Table(
    written.TABLE,
    metadata,
    Column("id", String(200), primary_key=True),  # the command's
    # The message, JSON. MySQL's TEXT ends at 64 KiB, and cuts off what is longer in some of its modes.
    Column("body", Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb"), nullable=False),
    Column("created_at", Float(53), nullable=False),  # by the producer's clock: an order, no more
    Column("error", Text),  # why a worker refused it; NULL: it is to be sent
)
Index("keepstep_outbox_created", outbox.c.created_at)
_CONNECT_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Written:
    """A command that stands in the outbox."""

    id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that a worker refused: it stays in the outbox until somebody removes it."""

    id: str
    body: str
    error: str


@dataclass
class Batch:
    """What one look found, and what becomes of it; that is written when the block ends."""

    found: list[Written]
    accepted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    """Why, by the command's id."""


class Outbox:
    """One producer's database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str) -> Self:
        """Return the outbox in the database of a SQLAlchemy URL; nothing is connected yet."""
        try:
            parsed = make_url(url)
            options = {"connect_timeout": _CONNECT_SECONDS} if parsed.get_backend_name() == "postgresql" else {}
            return cls(create_engine(parsed, pool_size=1, pool_pre_ping=True, connect_args=options))
        except (sqlalchemy_errors.ArgumentError, ImportError) as error:
            message = (
                f"an outbox's database must be a SQLAlchemy URL whose driver is installed ({type(error).__name__})"
            )
            raise InvalidSettings(message) from None

    @property
    def shown(self) -> str:
        """The database's URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def install(self) -> bool:
        """Make the table where it is missing; return whether it was."""
        with self._reached():
            missing = not inspect(self._engine).has_table(outbox.name)
            metadata.create_all(self._engine)
            return missing

    def definition(self) -> str:
        """Return what `install` would run, for those who do it by hand."""
        parts: list[DDLElement] = [CreateTable(outbox), *(CreateIndex(index) for index in outbox.indexes)]
        return "\n".join(f"{str(part.compile(self._engine)).strip()};" for part in parts)

    @contextmanager
    def batch(self, size: int) -> Iterator[Batch]:
        """Give the oldest commands that are to be sent, up to `size`; write what became of them when the block ends.

        Where rows can be locked they are until then, and what another relay has in hand is passed over. On SQLite,
        where a lock would hold up the producer, two relays may send the same command: that is one all the same.
        """
        looked = (
            select(outbox.c.id, outbox.c.body)
            .where(outbox.c.error.is_(None))
            .order_by(outbox.c.created_at, outbox.c.id)
            .limit(size)
        )
        locks = self._engine.dialect.name != "sqlite"
        with self._reached():
            connection = self._engine.connect()
        with connection:
            with self._reached():
                rows = connection.execute(looked.with_for_update(skip_locked=True) if locks else looked).all()
                if not locks:
                    connection.rollback()
            batch = Batch([Written(row.id, row.body.encode()) for row in rows])
            try:
                yield batch
            finally:
                with self._reached():
                    if batch.accepted:
                        connection.execute(delete(outbox).where(outbox.c.id.in_(batch.accepted)))
                    for command_id, error in batch.refused.items():
                        connection.execute(update(outbox).where(outbox.c.id == command_id).values(error=error))
                    connection.commit()

    def counts(self) -> Mapping[str, int]:
        """Return how many commands are `waiting` and how many were `refused`."""
        counted = select(func.count(), func.count(outbox.c.error)).select_from(outbox)
        with self._reached(), self._engine.connect() as connection:
            all_of_them, refused = connection.execute(counted).one()
        return {"waiting": all_of_them - refused, "refused": refused}

    def refused(self, limit: int) -> list[Refused]:
        """Return commands that workers refused, the oldest first."""
        looked = (
            select(outbox.c.id, outbox.c.body, outbox.c.error)
            .where(outbox.c.error.is_not(None))
            .order_by(outbox.c.created_at, outbox.c.id)
            .limit(limit)
        )
        with self._reached(), self._engine.connect() as connection:
            return [Refused(*row) for row in connection.execute(looked)]

    def again(self) -> int:
        """Have everything that was refused sent again; return how many commands that are."""
        with self._reached(), self._engine.begin() as connection:
            return connection.execute(update(outbox).where(outbox.c.error.is_not(None)).values(error=None)).rowcount

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (sqlalchemy_errors.OperationalError, sqlalchemy_errors.ProgrammingError) as error:
            if written.TABLE in str(error.orig) or "no such table" in str(error.orig):
                message = f"{self.shown} has no table {written.TABLE}: keepstep db install-outbox URL makes it"
                raise SchemaMismatch(message) from error
            message = f"the outbox's database {self.shown} cannot be used: {type(error.orig).__name__}"
            raise DatabaseUnavailable(message) from error
        except sqlalchemy_errors.DBAPIError as error:
            message = f"the outbox's database {self.shown} cannot be used: {type(error.orig).__name__}"
            raise DatabaseUnavailable(message) from error

    def dispose(self) -> None:
        """Close the connections."""
        self._engine.dispose()
