"""The tape of a transaction: what its statements were, and what the database answered.

A node runs again from the top after a wait or a crash, and a `with` block cannot be skipped. So the block of a
transaction that was committed is played again, against its tape instead of the database: each statement must be the one
that was recorded, and gets the answer that was recorded. Statements and their parameters stand on the tape as digests.
"""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from keepstep.errors import Diverged, TooLarge

_SHOWN_MAX = 120
_PLAIN = (str, int, float, complex, decimal.Decimal, dt.date, dt.time, dt.timedelta, uuid.UUID)
_CELL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """A statement that the database refused: the PEP 249 class, the driver's text and the SQLSTATE, if any."""

    kind: str
    text: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One statement and what came of it."""

    digest: bytes
    """Of the statement and its parameters."""
    columns: Sequence[tuple[str, int | None]] | None = None
    """Name and type code of each column; None for a statement without rows."""
    rows: Sequence[tuple[Any, ...]] = ()
    rowcount: int = -1
    lastrowid: int | None = None
    failure: Failure | None = None


@dataclass(slots=True)
class Tape:
    """The answers of a transaction, in order. `bytes_max` bounds what its rows hold, roughly, while it is recorded."""

    bytes_max: int
    answers: list[Answer] = field(default_factory=list)
    _bytes: int = 0

    def record(self, answer: Answer) -> None:
        """Add an answer."""
        self.answers.append(answer)

    def weigh(self, rows: Sequence[Sequence[Any]]) -> None:
        """Count rows that were fetched; raise `TooLarge` when there are more than a tape holds."""
        self._bytes += sum(_weight(cell) for row in rows for cell in row)
        if self._bytes > self.bytes_max:
            message = (
                f"ctx.transaction: its statements have returned more than {self.bytes_max} bytes (value_bytes_max), "
                "which is more than is recorded of a transaction; nothing was committed: select fewer rows and "
                "columns, or read them before the block"
            )
            raise TooLarge(message)

    def to_plain(self) -> list[Any]:
        """Return the tape as it is stored."""
        return [
            [
                answer.digest,
                None if answer.columns is None else [list(column) for column in answer.columns],
                [list(row) for row in answer.rows],
                answer.rowcount,
                answer.lastrowid,
                None if answer.failure is None else [answer.failure.kind, answer.failure.text, answer.failure.code],
            ]
            for answer in self.answers
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Tape:
        """Return a stored tape."""
        answers = [
            Answer(
                digest,
                None if columns is None else [tuple(column) for column in columns],
                [tuple(row) for row in rows],
                rowcount,
                lastrowid,
                None if failure is None else Failure(*failure),
            )
            for digest, columns, rows, rowcount, lastrowid, failure in plain
        ]
        return cls(0, answers)


class Player:
    """Answers the statements of a block that is played again; a different one raises `Diverged`."""

    def __init__(self, tape: Tape, what: str) -> None:
        """`what` names the transaction in errors."""
        self._answers = tape.answers
        self._what = what
        self._next = 0
        self.diverged: Diverged | None = None

    def answer(self, statement: str, parameters: Any) -> Answer:
        """Return what the database answered to the statement when the block ran for the first time."""
        if self._next == len(self._answers):
            self._diverge(f"it now runs a statement more: {shown(statement)}")
        found = self._answers[self._next]
        if found.digest != digest_of(statement, parameters):
            self._diverge(f"statement {self._next + 1} is now another, or has other parameters: {shown(statement)}")
        self._next += 1
        return found

    def end(self) -> None:
        """Raise `Diverged` when the block has run fewer statements than the first time."""
        if self.diverged is None and self._next < len(self._answers):
            self._diverge(f"it now runs {self._next} statements, then {len(self._answers)}")
        if self.diverged is not None:
            raise self.diverged  # the block caught it; it is not the block's to decide

    def _diverge(self, how: str) -> NoReturn:
        message = (
            f"{self._what} was committed by an earlier attempt, and its block is played again: {how}. Make what it "
            "says depend on the node's state and on what was asked of ctx before the block: ctx.now(), ctx.uuid() and "
            "ctx.random() in place of the clock and of chance, also in column defaults"
        )
        self.diverged = Diverged(message)
        raise self.diverged


def exactly(row: Sequence[Any]) -> tuple[Any, ...]:
    """Return a row as the first run and every later one are given it: views of memory as bytes."""
    return tuple(bytes(cell) if isinstance(cell, memoryview | bytearray) else cell for cell in row)


# --- digests ---


def digest_of(statement: str, parameters: Any) -> bytes:
    """Return the digest of a statement and its parameters, the same in every process."""
    hashed = hashlib.blake2b(digest_size=16)
    _feed(hashed, statement)
    _feed(hashed, parameters)
    return hashed.digest()


def _feed(hashed: Any, value: Any) -> None:
    value = _bare(value)
    if value is None or isinstance(value, bool):
        _part(hashed, "c", repr(value).encode())
    elif isinstance(value, bytes):
        _part(hashed, "b", value)
    elif isinstance(value, _PLAIN):
        _part(hashed, type(value).__name__, str(value).encode("utf-8", "surrogatepass"))
    elif isinstance(value, Mapping):
        _part(hashed, "m", str(len(value)).encode())
        for name in sorted(value, key=repr):
            _feed(hashed, name)
            _feed(hashed, value[name])
    elif isinstance(value, set | frozenset):
        _part(hashed, "s", str(len(value)).encode())
        for item in sorted(value, key=repr):
            _feed(hashed, item)
    elif isinstance(value, Sequence):
        _part(hashed, "l", str(len(value)).encode())
        for item in value:
            _feed(hashed, item)
    else:
        # The default representation has an address in it, which is another one in another process.
        told = type(value).__name__ if repr(value) == object.__repr__(value) else repr(value)
        _part(hashed, "o", told.encode("utf-8", "surrogatepass"))


def _bare(value: Any) -> Any:
    """Return what a driver's wrapper (`Binary`, `Json`) wraps."""
    for _ in range(3):
        if not hasattr(value, "adapted"):
            break
        value = value.adapted
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return bytes(value) if isinstance(value, memoryview | bytearray) else value


def _part(hashed: Any, kind: str, content: bytes) -> None:
    hashed.update(f"{kind}:{len(content)}:".encode())
    hashed.update(content)


def _weight(cell: Any) -> int:
    return _CELL_BYTES + (len(cell) if isinstance(cell, str | bytes | memoryview | list | tuple | dict) else 0)


def shown(statement: str) -> str:
    """Return the beginning of a statement, without its parameters."""
    line = " ".join(statement.split())
    return line if len(line) <= _SHOWN_MAX else line[:_SHOWN_MAX] + "…"
