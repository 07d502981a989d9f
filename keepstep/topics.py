"""The topic exchange of events: its routing keys, the queues of those who listen, and how an event gets into them.

On RabbitMQ it is a topic exchange. Redis and the file broker have none of their own: there Kombu keeps a table of
bindings in the broker, and whoever publishes puts a copy into each queue that is bound. It is put there as a message to
that queue and not to the exchange, so that one which its receiver did not acknowledge goes back to it alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import kombu
from kombu.transport.virtual.exchange import TopicExchange

from keepstep import blockage, broker

_logger = logging.getLogger(__name__)

QUEUE_EVENTS_MAX = 100_000
"""So many events are kept in a queue for somebody who does not come; past that, the log has them."""
_WORD_LENGTH_MAX = 80  # a routing key has 255 bytes
_NO_WORD = re.compile(r"[^A-Za-z0-9_-]")


def exchange_name(prefix: str) -> str:
    """Return the exchange's name; `prefix` is the deployment's."""
    return f"{prefix}.events"


def word(name: str) -> str:
    """Return a name as one word of a routing key: what is no letter, digit, `-` or `_` is `_`, at most 80 signs."""
    return _NO_WORD.sub("_", name)[:_WORD_LENGTH_MAX]


def routing_key(kind: str, tenant: str, graph: str) -> str:
    """Return an event's routing key: the two words of its kind, the tenant, the graph."""
    return f"{kind}.{word(tenant)}.{word(graph)}"


def exchange(prefix: str) -> kombu.Exchange:
    """Return the durable topic exchange."""
    return kombu.Exchange(exchange_name(prefix), type="topic", durable=True)


def queue(url: str, prefix: str, name: str, keys: Iterable[str]) -> kombu.Queue:
    """Return the durable queue `name`, bound to the exchange by these patterns; declaring it binds it."""
    arguments: dict[str, Any] = {}
    if broker.kind_of(url) == "amqp":
        arguments = {"x-queue-type": "quorum", "x-max-length": QUEUE_EVENTS_MAX}
    topic = exchange(prefix)
    bindings = [kombu.binding(topic, routing_key=key) for key in keys]
    return kombu.Queue(name, bindings=bindings, durable=True, queue_arguments=arguments)


class Announcer:
    """Publishes events over one channel, which must be one for commands: confirmed, on the disk."""

    def __init__(self, producer: kombu.Producer, prefix: str) -> None:
        self._producer = producer
        self._exchange = exchange(prefix)
        self._is_virtual = producer.connection.transport.driver_type in {"redis", "file", "memory"}
        self._full: set[str] = set()
        self._exchange(producer.channel).declare()

    def publish(self, body: bytes, key: str, **properties: Any) -> None:
        """Publish an event under a routing key; raise what the broker's library raises, and `Blocked`."""
        properties |= {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": "persistent"}
        channel = self._producer.channel
        blockage.check(channel)
        if not self._is_virtual:
            self._producer.publish(body, exchange=self._exchange.name, routing_key=key, **properties)
            return
        bound = TopicExchange(channel).lookup(channel.get_table(self._exchange.name), self._exchange.name, key, None)
        for name in sorted(bound):
            if self._has_room(channel, name):
                self._producer.publish(body, exchange="", routing_key=name, **properties)

    def _has_room(self, channel: Any, name: str) -> bool:
        if channel._size(name) < QUEUE_EVENTS_MAX:  # noqa: SLF001  kombu's public way declares the queue
            self._full.discard(name)
            return True
        if name not in self._full:
            self._full.add(name)
            _logger.warning("nobody takes the events out of queue %s: it gets no more", name)
        return False
