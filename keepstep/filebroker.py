"""A Kombu transport over a folder, for machines without a broker: `file://folder` or `file:///absolute/folder`.

Kombu's own `filesystem://` writes in place and reads without a lock, so it loses messages and hands half-written ones
to a worker. This one keeps them (`keepstep.spool` says how) for one machine, queues that are consumed by name, topic
exchanges, and direct exchanges of one connection. Broadcasts are refused: run workers without remote control, gossip
and mingle.
"""

from __future__ import annotations

import os
import threading
from queue import Empty
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments

from keepstep import spool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SCHEME = "file://"
_POLL_SECONDS_MIN = 0.01
_POLL_SECONDS_MAX = 0.025
_IDLE_SHARE = 0.02
"""The pause between two polls grows to this share of the time since the last message."""


def folder_of(url: str) -> str:
    """Return the absolute folder that a `file://` URL names: relative to the working folder, or after a third `/`."""
    folder = unquote(url.removeprefix(_SCHEME))
    if not url.startswith(_SCHEME) or not folder.strip("/"):
        message = f"a file broker's URL is file://folder or file:///absolute/folder, not {url!r}"
        raise ValueError(message)
    return os.path.abspath(folder)  # noqa: PTH100  a link stays what its owner made it


class QoS(virtual.QoS):
    """Acknowledgement by deleting the file; safe from any thread, as Celery's pools acknowledge from their own."""

    channel: Channel

    def ack(self, delivery_tag: str) -> None:
        """Delete the message."""
        self.channel.settle(delivery_tag)
        super().ack(delivery_tag)
        self.channel.connection.wake()

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT001, FBT002  kombu's signature
        """Give the message back to its queue, or delete it."""
        super().reject(delivery_tag, requeue=requeue)
        self.channel.settle(delivery_tag)
        self.channel.connection.wake()


class Channel(virtual.Channel):
    """Queues as folders."""

    QoS = QoS
    supports_fanout = False
    from_transport_options = (*virtual.Channel.from_transport_options, "fsync")
    fsync = False
    """Whether a publish returns only when the message is on the disk."""

    connection: Transport

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._without_acknowledgement: set[str] = set()
        self._expires_seconds: dict[str, float] = {}

    # --- what this transport cannot do ---------------------------------------------------------------------------

    def exchange_declare(self, exchange: str | None = None, type: str = "direct", **kwargs: Any) -> None:  # noqa: A002
        """Declare a direct or topic exchange; refuse others, whose messages would be lost without a word."""
        if (type or "direct") not in self.connection.implements.exchange_type:
            message = (
                f"the file broker has no {type} exchanges ({exchange!r}): run workers with "
                "worker_enable_remote_control=False, --without-gossip and --without-mingle, or use Redis or RabbitMQ"
            )
            raise ChannelError(message)
        super().exchange_declare(exchange, type, **kwargs)

    # --- consuming ----------------------------------------------------------------------------------------------

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,  # noqa: FBT001  kombu's signature
        callback: Callable[[Any], None],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        """Consume from `queue`; with `no_ack` a message is deleted as soon as it was read."""
        self._consume_as(queue, no_ack=no_ack)
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """Return the next message of `queue`, or None."""
        self._consume_as(queue, no_ack=no_ack)
        self.connection.spool.look_after()
        return super().basic_get(queue, no_ack=no_ack, **kwargs)

    def _consume_as(self, queue: str, *, no_ack: bool) -> None:
        (self._without_acknowledgement.add if no_ack else self._without_acknowledgement.discard)(queue)
        if (seconds := self._expires_seconds.get(queue)) is not None:
            self.connection.spool.consume(queue, expires_seconds=seconds)

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:  # noqa: ARG002  kombu's signature
        claim = self.connection.spool.claim(queue, keep=queue not in self._without_acknowledgement)
        if claim is None:
            raise Empty
        if claim.path is not None:
            self.connection.claims[claim.payload["properties"]["delivery_tag"]] = (queue, claim)
        return claim.payload

    def settle(self, delivery_tag: str) -> None:
        """Delete a claimed message that is still held."""
        held = self.connection.claims.pop(delivery_tag, None)
        if held is not None:
            self.connection.spool.acknowledge(held[1])

    def _restore(self, message: Any) -> None:
        held = self.connection.claims.pop(message.delivery_tag, None)
        if held is None:
            super()._restore(message)  # it was consumed without acknowledgement: its file is gone
        else:
            self.connection.spool.give_back(*held)

    # --- publishing and queues ----------------------------------------------------------------------------------

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        priority = message.get("properties", {}).get("priority") or 0
        self.connection.spool.put(queue, message, priority=priority, fsync=self.fsync)

    def prepare_queue_arguments(self, arguments: Mapping[str, Any] | None, **kwargs: Any) -> Any:
        """Return the arguments of a queue as RabbitMQ names them; only `x-expires` means something here."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        milliseconds = (kwargs.get("arguments") or {}).get("x-expires")
        if milliseconds is not None:
            self._expires_seconds[queue] = milliseconds / 1000
        self.connection.spool.declare(queue, expires_seconds=self._expires_seconds.get(queue))

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        """Bind `queue` to `exchange`; to a topic exchange for every process, and for good."""
        super().queue_bind(queue, exchange, routing_key, arguments, **kwargs)
        if exchange and self.typeof(exchange).type == "topic":
            self.connection.spool.bind(exchange, queue, routing_key)

    def get_table(self, exchange: str) -> list[tuple[str, str, str]]:
        """Return (routing key, its pattern, queue) of every binding to an exchange."""
        topic = self.typeof(exchange)
        if topic.type != "topic":
            return super().get_table(exchange)  # type: ignore[no-any-return]  # kombu has no types
        return [(key, topic.key_to_pattern(key), queue) for key, queue in self.connection.spool.bound(exchange)]

    def _has_queue(self, queue: str, **_: Any) -> bool:
        return self.connection.spool.exists(queue)

    def _size(self, queue: str) -> int:
        return self.connection.spool.size(queue)

    def _purge(self, queue: str) -> int:
        return self.connection.spool.purge(queue)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any) -> None:  # noqa: ARG002, FBT001, FBT002
        """Delete `queue` and what waits in it; unlike kombu's own, also one that is bound to no exchange."""
        if if_empty and self._size(queue):
            return
        self.connection.spool.delete(queue)
        self.state.queue_bindings_delete(queue)
        self._expires_seconds.pop(queue, None)


class Transport(virtual.Transport):
    """The connection: one folder, polled."""

    Channel = Channel
    can_parse_url = True  # the host part of a parsed URL is in lower case, and a folder's name is not
    driver_type = "file"
    driver_name = "keepstep"
    implements = virtual.Transport.implements.extend(
        asynchronous=False, exchange_type=frozenset({"direct", "topic"}), heartbeats=False
    )
    # A full or vanished disk is an outage, which ends: a worker reconnects after it, a client names the broker.
    connection_errors = (*virtual.Transport.connection_errors, OSError)

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._folder = folder_of(client.hostname)
        self._wake = threading.Event()
        self._busy_at = monotonic()
        self.claims: dict[str, tuple[str, spool.Claim]] = {}
        """Delivery tag to queue and claim. Of the transport: kombu rejects through any of its channels."""

    @property
    def spool(self) -> spool.Spool:
        """The folder as this process sees it: a forked child has its own."""
        return spool.opened(self._folder)

    def establish_connection(self) -> Transport:
        """Open the folder, and give back what dead processes left in it."""
        self.spool.look_after()
        return super().establish_connection()  # type: ignore[no-any-return]

    def wake(self) -> None:
        """Poll now: a worker that waited for room to prefetch has it."""
        self._wake.set()

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:  # noqa: ARG002
        """Deliver one message; raise `TimeoutError` when none came within `timeout` seconds."""
        start = monotonic()
        while True:
            self._wake.clear()
            self.spool.look_after()
            try:
                self.cycle.get(self._deliver, timeout=timeout)
            except Empty:
                pass
            else:
                self._busy_at = monotonic()
                return
            now = monotonic()
            pause = min(max(_POLL_SECONDS_MIN, (now - self._busy_at) * _IDLE_SHARE), _POLL_SECONDS_MAX)
            if timeout is not None:
                if now - start >= timeout:
                    raise TimeoutError
                pause = min(pause, start + timeout - now)
            self._wake.wait(pause)

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:  # noqa: ARG002, FBT001, FBT002
        """Return the URL: there is no secret in it."""
        return uri
