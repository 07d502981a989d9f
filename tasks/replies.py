"""Replies to commands, over a connection of their own.

Waiting for the broker's word on what was published means to read, and on the commands' connection that would be the
next command, in the middle of the one that is being answered.
"""

from __future__ import annotations

from typing import Any

import structlog
from kombu import Connection, Producer

from keepstep import broker
from keepstep.blockage import Blocked
from keepstep.settings import Settings
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")


class Replies:
    """Answers commands; for one thread. Never raises: a sender that hears nothing asks again."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: Connection | None = None
        self._producer: Producer | None = None

    def send(self, message: Any, command_id: str, reply: bytes) -> None:
        """Answer the command that came as `message`, when it says where to."""
        reply_to = message.properties.get("reply_to")
        if not isinstance(reply_to, str) or not reply_to:
            return
        # A connection that was idle may be dead without anybody having noticed: one more try on a fresh one.
        for last in (False, True):
            try:
                broker.publish_reply(
                    self._connected(),
                    reply,
                    reply_to=reply_to,
                    correlation_id=command_id,
                    queue=self._settings.queue,
                )
            except Exception as error:  # noqa: BLE001  drivers raise what they like; what was accepted stays so
                blocked = isinstance(error, Blocked)
                if not blocked:
                    self.close()
                if last or blocked:
                    log.warning("reply_failed", command_id=command_id, **told(error))
                    return
            else:
                return

    def close(self) -> None:
        """Close the connection; the next reply opens another."""
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.collect(socket_timeout=1)
            except Exception as error:  # noqa: BLE001  it is being dropped
                log.debug("replies_close_failed", **told(error))

    def _connected(self) -> Producer:
        if self._producer is None:
            self._connection = broker.connection(self._settings.broker, commands=True, queue=self._settings.queue)
            self._producer = Producer(self._connection.channel(), auto_declare=False)
        return self._producer
