"""Replies to commands, and commands that are left to others, over a connection of their own.

Waiting for the broker's word on what was published means to read, and on the commands' connection that would be the
next command, in the middle of the one that is being answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import structlog
from kombu import Connection, Producer

from keepstep import blockage, broker
from keepstep.blockage import Blocked
from keepstep.settings import Settings
from keepstep.tasks.hangup import hang_up
from keepstep.tasks.logs import told

log = structlog.get_logger("keepstep.worker")


class Replies:
    """Answers commands; for one thread. A reply is sent or logged: a sender that hears nothing asks again."""

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
                with self._connected() as producer:
                    broker.publish_reply(
                        producer, reply, reply_to=reply_to, correlation_id=command_id, queue=self._settings.queue
                    )
            except Exception as error:  # noqa: BLE001  drivers raise what they like; what was accepted stays so
                if last or isinstance(error, Blocked):
                    log.warning("reply_failed", command_id=command_id, **told(error))
                    return
            else:
                return

    def publish(self, body: Any, **properties: Any) -> None:
        """Publish another message, once; raise what the broker's library raises, and `Blocked`."""
        with self._connected() as producer:
            blockage.check(producer.channel)
            producer.publish(body, **properties)

    def close(self) -> None:
        """Close the connection; the next reply opens another."""
        connection, self._connection, self._producer = self._connection, None, None
        hang_up(connection, "replies_close_failed")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Producer]:
        """Give the connection's producer; drop it when it fails for another reason than that RabbitMQ is blocked."""
        try:
            if self._producer is None:
                self._connection = broker.connection(self._settings.broker, commands=True, queue=self._settings.queue)
                self._producer = Producer(self._connection.channel(), auto_declare=False)
            yield self._producer
        except Blocked:
            raise
        except Exception:
            self.close()
            raise
