"""A child is forked only while no service thread is inside the database or the broker.

A fork copies locks as they are. One that another thread held at that moment is held in the child for ever: SQLite's
own mutexes, a connection pool's, a driver's. The child then hangs at its first use of that library. Service threads
hold a gate while they work, and a fork waits, a bounded time, for all gates.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator

_WAIT_SECONDS_MAX = 1.0

_gates: weakref.WeakSet[Gate] = weakref.WeakSet()
_held: list[Gate] = []


class Gate:
    """Held by a thread while it works, by a fork while it happens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _gates.add(self)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep this process from forking until the block ends."""
        with self._lock:
            yield

    def _close(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=timeout)

    def _open(self) -> None:
        self._lock.release()


def _before_fork() -> None:
    deadline = time.monotonic() + _WAIT_SECONDS_MAX
    # One that does not come free in time (a frozen server) is left: a child that may hang beats a pool that does.
    _held.extend(gate for gate in list(_gates) if gate._close(max(0.0, deadline - time.monotonic())))  # noqa: SLF001


def _after_fork() -> None:
    while _held:
        _held.pop()._open()  # noqa: SLF001


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
