"""A transaction of the user's on the store's own database: the business rows and the journal's row, or neither.

The fence is taken last, so that the thread's row is locked for the moment of the commit only; a stale owner finds it
gone, and everything it wrote is undone.
"""

from __future__ import annotations

import contextlib
from typing import Any

import psycopg2
import psycopg2.errors
from sqlalchemy import Connection

from keepstep.crashpoints import reach
from keepstep.errors import DuplicateRow, EffectPending, TransactionRefused
from keepstep.store import effects
from keepstep.store.effects import EffectKey
from keepstep.store.engine import Store, Transaction
from keepstep.store.leases import Fence
from keepstep.store.outcomes import hold
from keepstep.store.taped import Recording
from keepstep.store.tapes import Tape

# Whose node is next on the connection may be another tenant: no role, setting, lock or temporary table is left to it.
_AS_NEW = (
    "SET SESSION AUTHORIZATION DEFAULT; RESET ALL; CLOSE ALL; UNLISTEN *; SELECT pg_advisory_unlock_all(); "
    "DISCARD SEQUENCES; DISCARD TEMP; SET datestyle TO 'ISO'"  # the last as the driver does when it connects
)


def time_limits(seconds: float) -> str:
    """Return what bounds a transaction on PostgreSQL; local to it, as a pooler in transaction mode needs it."""
    limit = max(1, int(seconds * 1000))
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    return "; ".join(f"SET LOCAL {name} = {limit}" for name in names)


def failed_before(what: str) -> TransactionRefused:
    """Return the error of a transaction in which a statement failed that was not in a savepoint."""
    message = (
        f"{what}: a statement in it failed, and PostgreSQL commits nothing after that; nothing was committed: put what "
        "may fail into `with conn.begin_nested():`"
    )
    return TransactionRefused(message)


class OwnTransaction:
    """A transaction under way on the store's database, and the connection that the user has for it."""

    def __init__(self, store: Store, fence: Fence, *, seconds: float, bytes_max: int, what: str) -> None:
        """Begin it. `seconds` are left for it, `bytes_max` bounds its tape, `what` names it in errors.

        Raises `DatabaseUnavailable`.
        """
        self._store = store
        self._fence = fence
        self._what = what
        self._loan = store.lend()
        try:
            with self._loan.use() as driver:
                self._cursor = driver.cursor()
                postgresql = store.dialect == "postgresql"
                self._cursor.execute(f"BEGIN; {time_limits(seconds)}" if postgresql else "BEGIN IMMEDIATE")
            self.tape = Tape(bytes_max)
            self.taped = Recording(self._loan.driver, store.engine.dialect, self.tape, what)
            self.connection: Connection = store.taped.connection(self.taped)
        except BaseException:
            self._loan.end(broken=True)
            raise

    @property
    def is_broken(self) -> bool:
        """Whether the database was lost under it."""
        return self._loan.is_broken

    def commit(self, key: EffectKey, *, tenant: str, name: str, arguments_digest: bytes, result: bytes) -> None:
        """Commit it with the journal's row. Raises `StaleLease`, and what the database says, when nothing is committed.

        A COMMIT whose answer is lost is looked up: it returns when it has landed.
        """
        try:
            recorded = self._recorded(key, tenant=tenant, name=name, arguments_digest=arguments_digest, result=result)
            reach("inside_transaction", key.call)
        except BaseException:
            self.undo()
            raise
        if not recorded:
            self.undo()
            message = f"{self._what} was recorded meanwhile: the node runs again and finds it"
            raise EffectPending(message)
        try:
            with self._loan.use():
                self._cursor.execute("COMMIT")
        except Exception as error:  # noqa: BLE001  whatever it is, only the journal says what became of it
            self.undo()
            if not self._store.patiently(lambda: effects.is_recorded(self._store, self._fence, key)):
                raise _of_driver(error) from None
        else:
            self._end()

    def _recorded(self, key: EffectKey, *, tenant: str, name: str, arguments_digest: bytes, result: bytes) -> bool:
        try:
            with self._loan.use():
                transaction = Transaction(self._store, self._cursor)
                hold(transaction, self._fence)
                return effects.record_within(
                    transaction,
                    self._fence,
                    key,
                    tenant=tenant,
                    name=name,
                    arguments_digest=arguments_digest,
                    result=result,
                )
        except psycopg2.errors.InFailedSqlTransaction:
            raise failed_before(self._what) from None

    def undo(self) -> None:
        """Roll it back."""
        try:
            self._cursor.execute("ROLLBACK")
        except Exception:  # noqa: BLE001  the connection may be what failed; closing it undoes as much
            self._end(broken=True)
        else:
            self._end()

    def _end(self, *, broken: bool = False) -> None:
        self.taped.is_over = True
        with contextlib.suppress(Exception):  # SQLAlchemy's own books; the connection itself is given back below
            self.connection.close()
        if self._store.dialect == "sqlite":
            # Nothing takes back what was attached or made temporary; a new connection is cheap.
            broken = broken or not self._store.in_memory
        elif not broken and not self._loan.is_broken:
            try:
                self._cursor.execute(_AS_NEW)
            except Exception:  # noqa: BLE001  whatever it is, a new connection serves the next one
                broken = True
        with contextlib.suppress(Exception):  # as it is with a connection that is lost
            self._cursor.close()
        self._loan.end(broken=broken)


def _of_driver(error: Exception) -> Exception:
    """Return what a COMMIT that failed is to be told as: a deferred constraint is the user's, not a row of ours."""
    cause: Any = error.__cause__
    return cause if isinstance(error, DuplicateRow) and isinstance(cause, Exception) else error
