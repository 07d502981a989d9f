"""The open connections of one process to one database.

SQLAlchemy's pool wraps each check-out in objects, events, a reset and weak references; at two check-outs per step those
cost a tenth of the step. Transactions here end by their own COMMIT or ROLLBACK, so there is nothing to reset.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

_PATIENCE_SECONDS = 30.0


class PoolExhausted(Exception):
    """Every connection of the pool is in use, and has been for a while."""


class Pool:
    """Keeps up to `kept` connections open, and hands out up to `most` at once. Safe in threads, not across a fork."""

    def __init__(self, connect: Callable[[], Any], *, kept: int, most: int) -> None:
        self._connect = connect
        self._kept = kept
        self._most = most
        # The one used last is the warmest, at both ends of the wire.
        self._idle: list[Any] = []
        self._in_use = 0
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0
        self._is_closed = False

    @property
    def in_use(self) -> int:
        """How many connections are handed out now."""
        return self._in_use

    def take(self) -> Any:
        """Return an idle connection, else a new one; raise `PoolExhausted`, or what connecting raises."""
        with self._lock:
            if self._in_use >= self._most:
                self._wait()
            self._in_use += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except BaseException:
            with self._lock:
                self._in_use -= 1
                self._given_back.notify()
            raise

    def _wait(self) -> None:
        self._waiting += 1
        try:
            if not self._given_back.wait_for(lambda: self._in_use < self._most, _PATIENCE_SECONDS):
                raise PoolExhausted
        finally:
            self._waiting -= 1

    def give(self, connection: Any, *, broken: bool = False) -> None:
        """Take a connection back; one that is broken, or one too many, is closed."""
        with self._lock:
            self._in_use -= 1
            keep = not broken and not self._is_closed and len(self._idle) < self._kept
            if keep:
                self._idle.append(connection)
            if self._waiting:
                self._given_back.notify()
        if not keep:
            _close(connection)

    def close(self) -> None:
        """Close the idle connections now and the others when they are given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)


def _close(connection: Any) -> None:
    with contextlib.suppress(Exception):  # it may be closed because it does not work
        connection.close()
