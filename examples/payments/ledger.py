"""The bank's ledger: what it holds and has booked, and the rules by which it does so. Nothing here knows Keepstep.

The rules are those that make a payment something to be careful with:

- A hold is placed once for each idempotency key: the same key again is the same hold.
- **Capturing a hold is not deduplicated.** Whoever captures twice has paid twice, as long as the account covers it.
  What the bank keeps of the key is a reference, by which it can be asked what it has booked.
- Releasing a hold twice is releasing it once; one that was captured cannot be released any more.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS balance (cents INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS hold (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, reference TEXT NOT NULL, account TEXT NOT NULL,
    cents INTEGER NOT NULL CHECK (cents > 0), status TEXT NOT NULL CHECK (status IN ('open', 'captured', 'released')),
    placed_at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS payment (
    number INTEGER PRIMARY KEY, hold INTEGER NOT NULL REFERENCES hold, key TEXT NOT NULL, reference TEXT NOT NULL,
    account TEXT NOT NULL, cents INTEGER NOT NULL CHECK (cents > 0), booked_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS payment_key ON payment (key);
CREATE TABLE IF NOT EXISTS request (
    number INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, key TEXT, reference TEXT, fault TEXT NOT NULL,
    began_at REAL NOT NULL, ended_at REAL, status INTEGER
);
"""


class Refused(Exception):
    """The bank says no: an HTTP status and a code that programs can read."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Hold:
    """Money set aside for a payment."""

    number: int
    key: str
    reference: str
    account: str
    cents: int
    status: str
    placed_at: float


@dataclass(frozen=True)
class Payment:
    """Money that was paid."""

    number: int
    hold: int
    key: str
    """The idempotency key it was asked for under."""
    reference: str
    account: str
    cents: int
    booked_at: float


@dataclass(frozen=True)
class Request:
    """A request as it came in."""

    number: int
    endpoint: str
    key: str | None
    reference: str | None
    """What the caller says it is about."""
    fault: str
    """What the bank did wrong: `none`, `lost`, `busy` or `failing`."""
    began_at: float
    ended_at: float | None
    """None: it is under way."""
    status: int | None


class Ledger:
    """The ledger in a SQLite file; may be shared by threads, and read by other processes."""

    def __init__(
        self,
        path: Path,
        *,
        closed: frozenset[str] = frozenset(),
        frozen: frozenset[str] = frozenset(),
        balance_cents: int = 10_000_000,
    ) -> None:
        """`closed`, `frozen`: accounts that take no money, which shows before or after something was held for them.

        `balance_cents`: what the payer has, in a new file.
        """
        self._closed = closed
        self._frozen = frozen
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(_TABLES)
        if self._connection.execute("SELECT 1 FROM balance").fetchone() is None:
            self._connection.execute("INSERT INTO balance VALUES (?)", (balance_cents,))

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    # --- what the bank does -------------------------------------------------------------------------------------------

    def place(self, key: str, *, reference: str, account: str, cents: int) -> Hold:
        """Set money aside, once for each key; raise `Refused` when the account takes none, or there is not enough."""
        with self._transaction() as execute:
            known = _one(execute("SELECT * FROM hold WHERE key = ?", (key,)), Hold)
            if known is not None:
                if (known.reference, known.account, known.cents) != (reference, account, cents):
                    raise Refused(409, "key_reused", "this key was used for another hold")
                return known
            if account in self._closed:
                raise Refused(422, "account_closed", f"account {account} is closed")
            if cents > self._available(execute):
                raise Refused(402, "not_covered", "the payer's account does not cover it")
            placed = "INSERT INTO hold VALUES (NULL, ?, ?, ?, ?, 'open', ?) RETURNING *"
            return _known(execute(placed, (key, reference, account, cents, time.time())), Hold)

    def capture(self, number: int, key: str, cents: int, *, account: str | None = None) -> Payment:
        """Pay out of a hold, as often as somebody asks; what is left of the hold is free again.

        `account`: whom the caller means to pay; another one than the hold's is refused.
        """
        with self._transaction() as execute:
            hold = self._hold(execute, number)
            if account not in (None, hold.account):
                raise Refused(409, "other_account", f"hold {number} is for another account")
            if hold.account in self._frozen:
                raise Refused(422, "account_frozen", f"account {hold.account} is frozen")
            if hold.status == "released":
                raise Refused(409, "hold_released", f"hold {number} was released")
            if cents > hold.cents:
                raise Refused(422, "over_hold", f"hold {number} is smaller than that")
            if hold.status == "captured" and cents > self._available(execute):
                raise Refused(402, "not_covered", "the payer's account does not cover it")
            execute("UPDATE hold SET status = 'captured' WHERE number = ?", (number,))
            execute("UPDATE balance SET cents = cents - ?", (cents,))
            booked = "INSERT INTO payment VALUES (NULL, ?, ?, ?, ?, ?, ?) RETURNING *"
            values = (number, key, hold.reference, hold.account, cents, time.time())
            return _known(execute(booked, values), Payment)

    def release(self, number: int) -> Hold:
        """Give free what a hold set aside."""
        with self._transaction() as execute:
            hold = self._hold(execute, number)
            if hold.status == "captured":
                raise Refused(409, "hold_captured", f"hold {number} was captured")
            execute("UPDATE hold SET status = 'released' WHERE number = ?", (number,))
            return self._hold(execute, number)

    # --- what it says -------------------------------------------------------------------------------------------------

    def payments(self, key: str | None = None) -> list[Payment]:
        """Return the payments, or those that were asked for under a key."""
        condition, values = ("", ()) if key is None else (" WHERE key = ?", (key,))
        with self._lock:
            rows = self._connection.execute(f"SELECT * FROM payment{condition} ORDER BY number", values)  # noqa: S608  constants
            return [Payment(*row) for row in rows]

    def holds(self) -> list[Hold]:
        """Return the holds."""
        with self._lock:
            return [Hold(*row) for row in self._connection.execute("SELECT * FROM hold ORDER BY number")]

    def balance_cents(self) -> int:
        """Return what the payer has, holds not counted."""
        with self._lock:
            return int(self._connection.execute("SELECT cents FROM balance").fetchone()[0])

    # --- requests -----------------------------------------------------------------------------------------------------

    def began(self, endpoint: str, key: str | None, reference: str | None = None) -> int:
        """Count a request; return its number."""
        with self._transaction() as execute:
            row = execute(
                "INSERT INTO request VALUES (NULL, ?, ?, ?, 'none', ?, NULL, NULL) RETURNING number",
                (endpoint, key, reference, time.time()),
            )
            return int(row.fetchone()[0])

    def ended(self, number: int, *, status: int, fault: str) -> None:
        """Note what came of a request."""
        with self._transaction() as execute:
            execute(
                "UPDATE request SET ended_at = ?, status = ?, fault = ? WHERE number = ?",
                (time.time(), status, fault, number),
            )

    def requests(self) -> list[Request]:
        """Return every request."""
        with self._lock:
            return [Request(*row) for row in self._connection.execute("SELECT * FROM request ORDER BY number")]

    # --- leaves -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection.execute
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    @staticmethod
    def _available(execute: Any) -> int:
        """Return what is neither paid nor set aside."""
        held = "SELECT coalesce(sum(cents), 0) FROM hold WHERE status = 'open'"
        return int(execute(f"SELECT cents - ({held}) FROM balance").fetchone()[0])  # noqa: S608  constants

    @staticmethod
    def _hold(execute: Any, number: int) -> Hold:
        found = _one(execute("SELECT * FROM hold WHERE number = ?", (number,)), Hold)
        if found is None:
            raise Refused(404, "no_such_hold", f"there is no hold {number}")
        return found


def _one(rows: Any, kind: Callable[..., T]) -> T | None:
    row = rows.fetchone()
    return None if row is None else kind(*row)


def _known(rows: Any, kind: Callable[..., T]) -> T:
    return kind(*rows.fetchone())
