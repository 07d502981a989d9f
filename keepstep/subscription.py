"""A subscription: the events of a deployment, as they come, in a queue of the subscriber's own."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import kombu

from keepstep import eventkinds, topics
from keepstep.errors import InvalidInput
from keepstep.link import Link

if TYPE_CHECKING:
    import types

_WAIT_SECONDS = 0.5
_LOOK_SECONDS = 0.2
"""What a broker may take to hand out what is there."""
_PREFETCH = 5
_DECLARE_SECONDS = 60.0
_FOREVER = 1e9


class Subscription:
    """Iterates over events, each a dict as docs/messages.md describes it; for one thread.

    The queue is made when the subscription is, and gathers what comes while nobody iterates, also after `close`. An
    event is acknowledged when the next one is asked for, or the subscription is left without an error: one whose
    handling failed comes again, and any may come twice, or after later ones (its `id` tells). `timeout`: end the
    iteration when nothing came for so many seconds; None: never. Raises `BrokerUnavailable` when the broker cannot be
    reached for `patience` seconds.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        name: str,
        *,
        tenant: str,
        kind: str = "*",
        graph: str | None = None,
        timeout: float | None = None,
        patience: float = 5.0,
    ) -> None:
        """`kind` and `graph` as of `Client.events`. Raises `InvalidInput` for a queue that is the deployment's own."""
        if name.startswith(f"{prefix}."):
            message = f"queue: names that begin with '{prefix}.' are the deployment's own queues; choose another"
            raise InvalidInput(message)
        family, _, rest = eventkinds.checked(kind).partition(".")
        keys = [f"{family}.{rest or '*'}.{topics.word(tenant)}.{'*' if graph is None else topics.word(graph)}"]
        self._tenant, self._graph = tenant, graph
        self._kind = re.compile(re.escape(kind).replace(r"\*", ".*"))
        self._link = Link(url, prefix, patience)
        self._queue = topics.queue(url, prefix, name, keys)
        self._timeout = timeout
        self._patience = patience
        self._declare_at = time.monotonic() + _DECLARE_SECONDS
        self._consumer: Any = None
        self._consuming_on: Any = None
        self._arrived: deque[Any] = deque()
        self._handled: Any = None
        self._link.run(lambda channel: self._queue(channel).declare(), time.monotonic() + patience)

    def __iter__(self) -> Self:
        """Begin, or go on: a loop that was left in the middle of an event begins with that one again."""
        if self._handled is not None:
            self._arrived.appendleft(self._handled)
            self._handled = None
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next event; acknowledge the one before."""
        deadline = time.monotonic() + (_FOREVER if self._timeout is None else self._timeout)
        while True:
            self._link.run(self._take_in, time.monotonic() + self._patience)
            while self._arrived:
                message = self._arrived.popleft()
                event = _event_in(message)
                if event is not None and self._is_wanted(event):
                    self._handled = message
                    return event
                message.ack()
            if time.monotonic() >= deadline:
                raise StopIteration

    def _is_wanted(self, event: dict[str, Any]) -> bool:
        """Whether an event is what this subscription is for.

        Other names may be the same word in a routing key, and the queue may be bound for other kinds from before.
        """
        is_theirs = event.get("tenant") == self._tenant and self._graph in (None, event.get("graph"))
        return is_theirs and self._kind.fullmatch(event["event"]) is not None

    def _take_in(self, channel: Any) -> None:
        if self._consuming_on is not channel:
            # What was delivered on another channel comes again on this one.
            self._arrived.clear()
            self._handled = None
            bound = self._queue(channel)
            bound.declare()
            self._consumer = kombu.Consumer(channel, [bound], on_message=self._arrived.append, auto_declare=False)
            self._consumer.qos(prefetch_count=_PREFETCH)
            self._consumer.consume()
            self._consuming_on = channel
        elif time.monotonic() >= self._declare_at:
            # A broker that was emptied has forgotten what the queue is bound to, and tells nobody.
            self._queue(channel).declare()
            self._declare_at = time.monotonic() + _DECLARE_SECONDS
        if self._handled is not None:
            handled, self._handled = self._handled, None
            handled.ack()
        if not self._arrived:
            seconds = _WAIT_SECONDS if self._timeout is None else min(_WAIT_SECONDS, max(self._timeout, _LOOK_SECONDS))
            self._link.drain(seconds)

    def remove(self) -> None:
        """Remove the queue and its bindings: nothing is gathered for this subscriber any more."""

        def delete(channel: Any) -> None:
            if self._consuming_on is channel:
                self._consumer.cancel()
            bound = self._queue(channel)
            bound.declare()  # a channel removes the bindings that it knows of
            bound.delete()

        self._handled = None
        self._link.run(delete, time.monotonic() + self._patience)
        self.close()

    def close(self) -> None:
        """Acknowledge what was handled and close the connection; the queue goes on gathering."""
        handled, self._handled = self._handled, None
        if self._link.channel is not None and self._link.channel is self._consuming_on:
            # What the broker does not hear of comes again.
            with suppress(Exception):
                if handled is not None:
                    handled.ack()
                for message in self._arrived:
                    message.requeue()
        self._arrived.clear()
        self._consuming_on = None
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if error is not None:
            self._handled = None  # its handling failed: it comes again
        self.close()


def _event_in(message: Any) -> dict[str, Any] | None:
    """Return the event in a message, None when it is something else: whoever may write to the broker may write that."""
    try:
        event = json.loads(message.body)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
