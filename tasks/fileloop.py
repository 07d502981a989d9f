"""The file broker on Celery's event loop.

Without an event loop Celery's prefork children take turns reading one pipe under a lock, and a child that is killed
while it waits there takes the lock with it: no task runs any more, in a worker that looks well. On the event loop each
child has a pipe of its own, and its death is noticed at once.
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

from keepstep import filebroker

_POLL_SECONDS_MIN, _POLL_SECONDS_MAX = 0.01, 0.025
_IDLE_SHARE = 0.02
"""The pause between two polls grows to this share of the time since the last message."""


class Transport(filebroker.Transport):
    """Polled by a timer of the loop instead of in a wait of its own."""

    implements = filebroker.Transport.implements.extend(asynchronous=True)

    _loop: Any = None
    _polls_soon = False
    _delivered_at = 0.0

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:  # noqa: ARG002  kombu's signature
        """Poll from now on; to be called in the loop's thread."""
        self._loop = loop
        loop.call_soon(self._on_time)

    def close_connection(self, connection: Any) -> None:
        """Stop polling and close."""
        self._loop = None
        super().close_connection(connection)

    def wake(self) -> None:
        """Poll at the loop's next turn: an acknowledged message has made room for another. May come from any thread."""
        super().wake()
        loop = self._loop
        if loop is not None and not self._polls_soon:
            self._polls_soon = True
            loop.call_soon(self._on_room)

    def _on_room(self) -> None:
        self._polls_soon = False
        if self._loop is not None:
            self._poll()

    def _on_time(self) -> None:
        if self._loop is None:
            return
        self._poll()
        idle_seconds = time.monotonic() - self._delivered_at
        self._loop.call_later(min(max(_POLL_SECONDS_MIN, idle_seconds * _IDLE_SHARE), _POLL_SECONDS_MAX), self._on_time)

    def _poll(self) -> None:
        """Deliver what there is, as far as there is room: no more than is prefetched."""
        self.spool.look_after()
        try:
            while True:
                self.cycle.get(self._deliver)
                self._delivered_at = time.monotonic()
        except Empty:
            pass
