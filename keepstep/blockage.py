"""RabbitMQ that takes nothing in: while its memory or disk is short it does not read connections that publish.

It says so to each of them when it publishes. A message that was being sent stays in the socket, and arrives when the
alarm is over; so does the end of a connection: it stays with RabbitMQ until then.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Blocked(ConnectionError):
    """RabbitMQ reads nothing of who publishes, until its memory or disk is no longer short."""


class _Blockage:
    """Whether RabbitMQ has stopped reading one connection."""

    def __init__(self) -> None:
        self._is_on = False

    def begin(self, reason: str) -> None:
        """Fail the publish that is under way at once; its time-out would come later and tell less."""
        self._is_on = True
        raise Blocked(reason)

    def end(self) -> None:
        """Let messages be sent again."""
        self._is_on = False

    def check(self, connection: Any) -> None:
        """Hear what RabbitMQ has said since; raise when it is not that it reads again."""
        if self._is_on:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0)
        if self._is_on:
            raise Blocked


def options() -> dict[str, Any]:
    """Return the transport options that let a connection know of its blockage."""
    blockage = _Blockage()
    return {"on_blocked": blockage.begin, "on_unblocked": blockage.end}


def check(channel: Any) -> None:
    """Raise `Blocked` while a message could only be written into the socket of a RabbitMQ that does not read it.

    Another connection would be no better, and both would stay with RabbitMQ: keep the one until the blockage is over.
    """
    connection = getattr(channel, "connection", None)
    begin = getattr(connection, "on_blocked", None)
    if begin is not None:
        begin.__self__.check(connection)
