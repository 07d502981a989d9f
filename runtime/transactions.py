"""Transactions: business rows and the journal's record of them, committed together, once.

The first time, a block runs on a connection to the database and what it is answered is recorded. That record is the
transaction's result in the journal. On the store's database it is committed with the rows. On another database it is
committed with them into a journal there; the store hears of it afterwards, and asks there when it has not. Every other
time the block runs on its record alone: no database is asked, and a statement that is another one blocks the thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from keepstep.crashpoints import Died, reach
from keepstep.errors import (
    DatabaseUnavailable,
    Diverged,
    EffectPending,
    EffectUnknown,
    NodeTimeout,
    NotStorable,
    StaleLease,
    StepError,
    UnknownDatabase,
)
from keepstep.runtime import blocks
from keepstep.runtime.codec import Codec
from keepstep.runtime.databases import Database
from keepstep.runtime.effects import EffectDeclaration
from keepstep.runtime.journal import Call, Journal
from keepstep.runtime.watchdog import undisturbed
from keepstep.store import effects as journal_rows
from keepstep.store.engine import Store
from keepstep.store.foreign_journal import ForeignTransaction, OutcomeUnknown
from keepstep.store.leases import Fence
from keepstep.store.taped import Playing, Taped
from keepstep.store.tapes import Player, Tape
from keepstep.store.transactions import OwnTransaction

if TYPE_CHECKING:
    from sqlalchemy import Connection

_DECLARED = EffectDeclaration("transaction", idempotent=False)
_ASKED_AGAIN_SECONDS = 5.0


class _Work(Protocol):
    """What a block does at its end, by where its statements went."""

    @property
    def connection(self) -> Connection:
        """What the user has."""
        ...

    @property
    def taped(self) -> Taped:
        """What the connection is over."""
        ...

    def commit(self) -> None:
        """Make it count; raise when it does not."""
        ...

    def undo(self, error: BaseException | None) -> None:
        """Undo it; raise what is to be told instead of the error that is the reason."""
        ...


class TransactionBook:
    """The transactions of one attempt of a node run."""

    def __init__(
        self,
        store: Store,
        fence: Fence,
        journal: Journal,
        databases: Mapping[str, Database],
        *,
        tenant: str,
        codec: Codec,
        remaining: Callable[[], float],
    ) -> None:
        """`remaining` says how many seconds of the node's time are left."""
        self.store = store
        self.fence = fence
        self.journal = journal
        self.tenant = tenant
        self.codec = codec
        self.remaining = remaining
        self._databases = databases
        self._open: set[Block] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._left_open: str | None = None

    def block(self, database: str | None, key: str | None) -> Block:
        """Return a transaction to be begun; raise `UnknownDatabase`, and `TransactionRefused` inside another."""
        blocks.refuse_inside(_named(database))
        if database is None:
            return Block(self, None, key)
        found = self._databases.get(database)
        if found is None:
            known = ", ".join(map(repr, self._databases)) or "none"
            message = f"ctx.transaction: the graph registers no database {database!r} (registered: {known})"
            raise UnknownDatabase(message)
        return Block(self, found, key)

    def add(self, block: Block) -> bool:
        """Take in a block that is open; False when the node has ended meanwhile."""
        with self._lock:
            if not self._is_closed:
                self._open.add(block)
            return not self._is_closed

    def remove(self, block: Block) -> None:
        """Forget a block that has ended."""
        with self._lock:
            self._open.discard(block)

    def close(self) -> None:
        """Begin nothing more, and undo what was left open: the node has ended."""
        with self._lock:
            self._is_closed = True
            left = list(self._open)
        for block in left:
            if block.abandon():
                self._left_open = block.what

    def check_settled(self) -> None:
        """Raise `StepError` when the node ended inside a transaction."""
        if self._left_open is not None:
            message = f"the node ended while {self._left_open} was open; it was undone"
            raise StepError(message)


def _named(database: str | None) -> str:
    return "ctx.transaction()" if database is None else f"ctx.transaction({database!r})"


class Block:
    """One transaction, from its beginning to its end."""

    def __init__(self, book: TransactionBook, database: Database | None, key: str | None) -> None:
        self.what = _named(None if database is None else database.name)
        self._book = book
        self._database = database
        self._key = key
        self._work: _Work | None = None
        self._is_given_up = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether it has begun and not ended."""
        return self._work is not None

    def begin(self) -> Connection:
        """Begin it and return the connection that its statements go to."""
        name = None if self._database is None else self._database.name
        digest = hashlib.blake2b(self._book.codec.encode(["transaction", name]), digest_size=16).digest()
        call = self._book.journal.reserve(_DECLARED, digest, self._key)
        try:
            with self._lock, undisturbed():
                work = self._work = self._begun(call)
        except BaseException as error:
            # The alarm may come the moment it is let in again, when the transaction is open.
            begun, self._work = self._work, None
            if begun is not None:
                begun.undo(error)
            self._book.journal.end(call)
            raise
        if self._is_given_up or not self._book.add(self):
            self.abandon()
            message = f"{self.what} was begun when the node had ended; nothing was done"
            raise StepError(message)
        return work.connection

    def enter(self) -> None:
        """Say that what follows stands inside it."""
        blocks.entered(self)

    def commit(self) -> None:
        """End it: commit, or raise what forbids that, and then nothing is committed."""
        with self._lock, undisturbed():
            work, self._work = self._work, None
            self._book.remove(self)
            if work is None:
                message = f"{self.what} was open when the node ended; it was undone"
                raise StepError(message)
            if work.taped.refused is not None:
                work.undo(work.taped.refused)
                raise work.taped.refused
            work.commit()

    def undo(self, error: BaseException) -> None:
        """End it with an exception that left the block; raise what is to be told instead, if anything."""
        with self._lock, undisturbed():
            work, self._work = self._work, None
            self._book.remove(self)
            if work is not None:
                work.undo(error)

    def abandon(self) -> bool:
        """Undo it, whoever is inside; return whether it was open."""
        self._is_given_up = True
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return False
            # Without its outcome an intent is found out about by the next attempt; and the node's time is told anyhow.
            with contextlib.suppress(DatabaseUnavailable, NodeTimeout):
                work.undo(StepError(f"{self.what} was left open"))
            return True

    # --- beginning ----------------------------------------------------------------------------------------------------

    def _begun(self, call: Call) -> _Work:
        book = self._book
        found = book.journal.found(call)
        if found is not None and found.state == journal_rows.DONE and found.resolved_by is None:
            return _Played(book, self.what, call, self._dialect_of(), found.result or b"")
        if self._database is None:
            return self._own(call)
        if found is not None and found.state == journal_rows.DONE:
            message = (
                f"{self.what} ({call.key.step}/{call.key.run}/{call.key.call}): {found.resolved_by} said that it "
                "happened, but what it did only its database knows: resolve it as not happened, and that is asked"
            )
            book.journal.hold_up(EffectUnknown(message))
        return self._foreign(call, self._database, is_unknown=found is not None and found.state == journal_rows.INTENT)

    def _dialect_of(self) -> Any:
        return self._book.store.taped if self._database is None else self._database.opened().taped

    def _seconds(self) -> float:
        seconds = self._book.remaining()
        if seconds <= 0:
            message = f"{self.what} was not begun: the node's time is over"
            raise NodeTimeout(message)
        return seconds

    def _own(self, call: Call) -> _Work:
        book = self._book
        book.journal.check_course(before=self.what)
        seconds = self._seconds()
        begun = book.store.patiently(
            lambda: OwnTransaction(
                book.store, book.fence, seconds=seconds, bytes_max=book.codec.value_bytes_max, what=self.what
            )
        )
        return _Own(book, self.what, call, begun)

    def _foreign(self, call: Call, database: Database, *, is_unknown: bool) -> _Work:
        book = self._book
        opened = database.opened()
        if not book.journal.intend(call):
            return self._begun(call)  # its outcome is known by now
        try:
            begun = ForeignTransaction(
                opened,
                f"{call.key.step}/{call.key.run}/{call.key.call}",
                call.key.thread_id,
                seconds=self._seconds(),
                bytes_max=book.codec.value_bytes_max,
                what=self.what,
            )
        except Exception as error:
            if is_unknown:
                # An earlier attempt may have committed it: that is no failure of the node's, and nothing to give up.
                _pending(book, f"{self.what} may have been committed by an earlier attempt", error)
            book.journal.fail(call, error)
            raise
        if begun.stored is None:
            return _Foreign(book, self.what, call, begun)
        _record(book, self.what, call, begun.stored)
        return _Played(book, self.what, call, opened.taped, begun.stored)


@contextlib.contextmanager
def held(block: Block) -> Iterator[Connection]:
    """Run a `with` block as a transaction."""
    connection = block.begin()
    block.enter()
    try:
        yield connection
    except BaseException as error:
        block.undo(error)
        raise
    block.commit()


# --- by where the statements went ---


class _Played:
    """A block that was committed before: its statements are answered from its tape."""

    def __init__(self, book: TransactionBook, what: str, call: Call, taped: Any, stored: bytes) -> None:
        self._book = book
        self._call = call
        self._player = Player(Tape.from_plain(book.codec.decode(stored)), what)
        self.taped = Playing(taped.dialect, self._player, what)
        self.connection: Connection = taped.connection(self.taped)

    def commit(self) -> None:
        self._end()
        try:
            self._player.end()
        except Diverged as error:
            self._book.journal.hold_up(error)

    def undo(self, error: BaseException | None) -> None:  # noqa: ARG002  what was committed stays, whatever it is
        self._end()
        if self._player.diverged is not None:
            self._book.journal.hold_up(self._player.diverged)

    def _end(self) -> None:
        self.taped.is_over = True
        self.connection.close()
        self._book.journal.end(self._call)


class _Own:
    """A block on the store's database."""

    def __init__(self, book: TransactionBook, what: str, call: Call, begun: OwnTransaction) -> None:
        self._book = book
        self._what = what
        self._call = call
        self._begun = begun
        self.taped = begun.taped
        self.connection = begun.connection

    def commit(self) -> None:
        book, call = self._book, self._call
        try:
            stored = _stored(book, self._what, self._begun.tape)
        except BaseException as error:
            self.undo(error)
            raise
        try:
            self._begun.commit(
                call.key, tenant=book.tenant, name=_DECLARED.name, arguments_digest=call.digest, result=stored
            )
        except BaseException:
            book.journal.end(call)
            raise
        book.journal.ended(call, stored)

    def undo(self, error: BaseException | None) -> None:
        is_lost = self._begun.is_broken
        self._begun.undo()
        self._book.journal.end(self._call)
        if not isinstance(error, Exception):
            return
        if self._book.remaining() <= 0:
            # The database ended what took longer than the node has; the error is about that, or beside the point.
            raise _overdue(self._what) from error
        if is_lost:
            message = f"{self._what}: the connection was lost; nothing was committed"
            raise DatabaseUnavailable(message) from error


class _Foreign:
    """A block on another database."""

    def __init__(self, book: TransactionBook, what: str, call: Call, begun: ForeignTransaction) -> None:
        self._book = book
        self._what = what
        self._call = call
        self._begun = begun
        self.taped = begun.taped
        self.connection = begun.connection

    def commit(self) -> None:
        book = self._book
        try:
            stored = _stored(book, self._what, self._begun.tape)
            # Nothing there holds back an attempt that was overtaken or cancelled; at least it looks.
            book.store.patiently(lambda: journal_rows.check_held(book.store, book.fence))
        except BaseException as error:
            self.undo(error)
            raise
        try:
            self._begun.commit(stored)
        except OutcomeUnknown as error:
            _pending(book, f"{self._what} may have been committed", error)
        except BaseException as error:
            self._failed(error)
            raise
        reach("after_transaction", self._call.key.call)
        _record(book, self._what, self._call, stored)

    def undo(self, error: BaseException | None) -> None:
        self._begun.undo()
        self._failed(error)
        if isinstance(error, Exception) and self._book.remaining() <= 0:
            raise _overdue(self._what) from error

    def _failed(self, error: BaseException | None) -> None:
        if isinstance(error, StaleLease | Died):
            self._book.journal.end(self._call)
        else:
            self._book.journal.fail(self._call, error or StepError())


def _stored(book: TransactionBook, what: str, tape: Tape) -> bytes:
    """Return a tape as it is stored, if it may be committed still."""
    if book.remaining() <= 0:
        raise _overdue(what)
    try:
        return book.codec.encode(tape.to_plain(), path="$transaction")
    except NotStorable:
        for number, answer in enumerate(tape.answers, 1):
            _check_cells(book.codec, what, number, answer.columns or (), answer.rows)
        raise


def _check_cells(codec: Codec, what: str, number: int, columns: Any, rows: Any) -> None:
    for row in rows:
        for (column, _), cell in zip(columns, row, strict=True):
            try:
                codec.encode(cell)
            except NotStorable as error:
                message = (
                    f"{what}: column {column!r} of statement {number} has a value that cannot be recorded "
                    f"({error.message}); nothing was committed: cast it in SQL, or do not select it"
                )
                raise NotStorable(message) from None


def _record(book: TransactionBook, what: str, call: Call, stored: bytes) -> None:
    """Record in the store what another database has committed."""
    store, fence = book.store, book.fence
    try:
        recorded = store.patiently(
            lambda: journal_rows.finish(store, fence.nonce, call.key, state=journal_rows.DONE, result=stored)
        )
    except Exception as error:  # noqa: BLE001  it is committed, whatever happened here: the next attempt finds it there
        _pending(book, f"{what} was committed and could not be recorded", error)
    if not recorded:
        raise StaleLease
    book.journal.ended(call, stored)


def _pending(book: TransactionBook, why: str, error: BaseException) -> NoReturn:
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    pending = EffectPending(
        f"{why}, and that is found out when the node runs again ({text})", seconds=_ASKED_AGAIN_SECONDS
    )
    book.journal.hold_up(pending)


def _overdue(what: str) -> NodeTimeout:
    return NodeTimeout(f"{what} was not committed: the node's time is over")
