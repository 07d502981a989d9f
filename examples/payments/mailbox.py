"""What the mail server has taken in, in a SQLite file: who counts its rows knows how often somebody was written to."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

_TABLE = """
CREATE TABLE IF NOT EXISTS mail (
    number INTEGER PRIMARY KEY, message_id TEXT NOT NULL, recipient TEXT NOT NULL, reference TEXT NOT NULL,
    subject TEXT NOT NULL, text TEXT NOT NULL, arrived_at REAL NOT NULL
)
"""


@dataclass(frozen=True)
class Mail:
    """A mail that was taken in."""

    number: int
    message_id: str
    recipient: str
    reference: str
    """The header X-Refund."""
    subject: str
    text: str
    arrived_at: float


class Mailbox:
    """The mails; other processes may read them. Nothing is dropped: the same mail twice is two rows."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=10)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(_TABLE)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add(self, *, message_id: str, recipient: str, reference: str, subject: str, text: str) -> None:
        """Take a mail in."""
        values = (message_id, recipient, reference, subject, text, time.time())
        self._connection.execute("INSERT INTO mail VALUES (NULL, ?, ?, ?, ?, ?, ?)", values)

    def mails(self, message_id: str | None = None) -> list[Mail]:
        """Return the mails, or those of a Message-ID, in the order in which they came."""
        condition, values = ("", ()) if message_id is None else (" WHERE message_id = ?", (message_id,))
        rows = self._connection.execute(f"SELECT * FROM mail{condition} ORDER BY number", values)  # noqa: S608  constants
        return [Mail(*row) for row in rows]
