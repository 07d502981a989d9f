"""A session: the deployment that one command talks to, and how it answers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from keepstep.errors import DatabaseUnavailable, InvalidInput, InvalidSettings, KeepstepError, NotConfirmed

if TYPE_CHECKING:
    from pathlib import Path

    from keepstep.cli.output import Output
    from keepstep.client import Client, Receipt, Reply
    from keepstep.runtime.reader import Reader
    from keepstep.settings import Settings
    from keepstep.store.engine import Store

T = TypeVar("T")


class OutputClosed(Exception):
    """Whoever read the output has gone."""


@dataclass(frozen=True)
class Session:
    """What the options that every command has say; None: the settings decide."""

    database: str | None = None
    broker: str | None = None
    tenant: str | None = None
    as_json: bool = False
    confirm: bool = True
    confirm_seconds: float = 10.0

    def refined(self, **options: Any) -> Session:
        """Return the session with what a command's own options say besides."""
        given = {name: value for name, value in options.items() if value is not None}
        if self.as_json:
            given["as_json"] = True
        return replace(self, **given)

    @cached_property
    def settings(self) -> Settings:
        """The deployment's settings; raises `InvalidSettings`."""
        from keepstep.settings import load

        return load(database=self.database, broker=self.broker, tenant=self.tenant)

    @cached_property
    def output(self) -> Output:
        """Where to and how this command answers."""
        from keepstep.cli.output import Output

        return Output(as_json=self.as_json)

    def hint(self, command: str) -> str:
        """Return a command to copy, with the options that this one was given; never one with a password."""
        given = {"--database": self.database, "--broker": self.broker, "--tenant": self.tenant}
        options = [f"{name} {shlex.quote(value)}" for name, value in given.items() if value and "@" not in value]
        return " ".join(["keepstep", *options, command])

    # --- sending ------------------------------------------------------------------------------------------------------

    @contextmanager
    def client(self, *, roles: Sequence[str] = ()) -> Iterator[Client]:
        """Give a client for the deployment's broker. `roles` are those of who speaks, for commands that are signed."""
        from keepstep import places
        from keepstep.client import Client

        problem = places.broker_problem(self.settings.broker)
        if problem is not None:
            raise InvalidSettings(problem)
        with Client(settings=self.settings, roles=roles, confirm=self.confirm, timeout=self.confirm_seconds) as client:
            try:
                yield client
            except NotConfirmed as error:
                # The word that is missing most often is that nobody is there to give it.
                message = (
                    f"no worker has accepted it within {self.confirm_seconds:g} s. It is in the queue and may be "
                    f"accepted later. Is a worker running? Try: {self.hint('doctor')}"
                )
                raise NotConfirmed(message) from error

    def reply(self, receipt: Receipt) -> Reply | None:
        """Return what a worker said of a command that a client with `confirm` has sent; None without confirmation."""
        return receipt.accepted(timeout=self.confirm_seconds) if self.confirm else None

    # --- reading ------------------------------------------------------------------------------------------------------

    @contextmanager
    def store(self) -> Iterator[Store]:
        """Give the store, without looking at its schema."""
        from keepstep.store.engine import Store

        store = Store.open(self.settings.database)
        try:
            yield store
        finally:
            store.dispose()

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Give a reader of the deployment's database; errors tell the way out."""
        missing = self.missing_file()
        if missing is not None:
            message = f"there is no database yet at {missing}: a worker makes it, or: {self.hint('db upgrade')}"
            raise DatabaseUnavailable(message)
        from keepstep.runtime.reader import Reader

        with self.store() as store:
            try:
                yield Reader(settings=self.settings, store=store)
            except (InvalidInput, OutputClosed, OSError, KeyboardInterrupt):
                raise
            except Exception as error:
                # A file that may not be written, or tables and columns that are not there: say so rather than what
                # the driver made of it.
                from keepstep import places
                from keepstep.store import migrate

                problem = places.database_problem(self.settings.database)
                if problem is not None:
                    raise InvalidSettings(problem) from error
                if not isinstance(error, KeepstepError):
                    migrate.check(store)
                raise

    def glance(self, look: Callable[[Reader], T]) -> T | None:
        """Return what a look at the database says; None when it cannot be asked: commands that send can do without."""
        try:
            if self.missing_file() is not None:
                return None
            with self.reader() as reader:
                return look(reader)
        except Exception:  # noqa: BLE001  whatever is wrong there is no error of what was asked for
            return None

    def missing_file(self) -> Path | None:
        """Return the SQLite file that the settings name when it is not there: looking must not make it."""
        from keepstep import places

        path = places.sqlite_file(self.settings.database)
        try:
            return None if path is None or path.exists() else path
        except OSError as error:
            message = f"{path} cannot be looked at: {error.strerror}. Let this user read it, or set KEEPSTEP_DATABASE"
            raise InvalidSettings(message) from None
