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
_PATTERN_LENGTH_MAX = 255
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
        self._told: set[str] = set()
        self._exchange(producer.channel).declare()

    def publish(self, body: bytes, key: str, **properties: Any) -> None:
        """Publish an event under a routing key; raise what the broker's library raises, and `Blocked`."""
        properties |= {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": "persistent"}
        channel = self._producer.channel
        blockage.check(channel)
        if not self._is_virtual:
            self._producer.publish(body, exchange=self._exchange.name, routing_key=key, **properties)
            return
        for name in sorted(self._bound(channel, key)):
            try:
                if self._has_room(channel, name):
                    self._producer.publish(body, exchange="", routing_key=name, **properties)
            except self._producer.connection.channel_errors as error:
                if "WRONGTYPE" not in str(error):
                    raise
                self._tell_once(name, "is no queue: it gets no events")

    def _bound(self, channel: Any, key: str) -> set[str]:
        """Return the queues that are bound by a pattern which the routing key fits.

        Whoever reaches the broker may write into the table: what cannot be read there must not stop the others.
        """
        topic = TopicExchange(channel)
        found = set()
        for binding in channel.get_table(self._exchange.name):
            match binding:
                # By the pattern alone: the expression beside it is its writer's.
                case (str(pattern), _, str(queue)) if queue and 0 < len(pattern) <= _PATTERN_LENGTH_MAX:
                    if re.match(topic.key_to_pattern(pattern), key):
                        found.add(queue)
                case _:
                    self._tell_once(repr(binding)[:200], "is no binding: it is passed over")
        return found

    def _tell_once(self, what: str, problem: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _logger.warning("%s %s", what, problem)

    def _has_room(self, channel: Any, name: str) -> bool:
        if channel._size(name) < QUEUE_EVENTS_MAX:  # noqa: SLF001  kombu's public way declares the queue
            self._told.discard(name)
            return True
        self._tell_once(name, "is full, as nobody takes its events: it gets no more")
        return False
