"""Events: gives what happened its place in the log, and publishes it on the broker, whoever listens there.

Every worker looks; one at a time does it. The log is the promise: an event that a broker lost, or nobody took, still
stands there. On the broker each comes at least once, in the log's order.
"""

from __future__ import annotations

import random
import time

import structlog
from kombu import Connection, Producer

from keepstep import broker, topics
from keepstep.crashpoints import reach
from keepstep.runtime.reader import event_of
from keepstep.settings import Settings
from keepstep.store import events
from keepstep.store.engine import Store
from keepstep.store.events import EventView
from keepstep.tasks import messages
from keepstep.tasks.hangup import hang_up
from keepstep.tasks.logs import told
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")

_POLL_SECONDS = 0.5
_PLACED_MAX = 500
_PUBLISHED_MAX = 100
_HOLD_SECONDS = 10.0
"""How long one worker publishes before another may think that it is dead."""
_PUBLISH_SECONDS_MAX = _HOLD_SECONDS / 3
"""How long it goes on before it says how far it has come, and holds on anew."""
_BROKEN_SECONDS = 5.0
_OPERATION_SECONDS_MAX = 2.0


class Events(Service):
    """Places and publishes events."""

    name = "events"

    def __init__(self, settings: Settings, worker_id: str, store: Store) -> None:
        """`store` is somebody else's, who has little use for it: it is not closed here."""
        super().__init__()
        self._settings = settings
        self._worker_id = worker_id
        self._store = store
        self._connection: Connection | None = None
        self._announcer: topics.Announcer | None = None

    def work(self) -> float:
        """Place what is new and publish a batch; return how soon to look again: at once when there is more."""
        with self.gate.hold():
            left = events.pending(self._store)
            placed = events.place(self._store, limit=_PLACED_MAX) if left.unplaced else 0
            if placed:
                reach("after_place")
            more = placed == _PLACED_MAX
            if self._settings.publish_events and (placed or left.unpublished):
                try:
                    more = self._publish() or more
                except Exception as error:  # noqa: BLE001  drivers raise what they like; the log has them all
                    self._hang_up()
                    log.info("events_left_in_log", **told(error))
                    return _BROKEN_SECONDS
        # Jittered, so that the workers of a fleet do not all look at the same moment.
        return 0.0 if more else _POLL_SECONDS * random.uniform(0.7, 1.3)  # noqa: S311  not a secret

    def _publish(self) -> bool:
        """Publish a batch, unless another worker does; say whether there may be more."""
        last = events.hold_publishing(self._store, self._worker_id, seconds=_HOLD_SECONDS)
        if last is None:
            return False
        bytes_max = self._settings.message_bytes_max
        batch = events.of_all(self._store, after=last, limit=_PUBLISHED_MAX, bytes_max=bytes_max)
        sent, until = last, time.monotonic() + _PUBLISH_SECONDS_MAX
        try:
            announcer = self._announcer or self._connected()
            for row in batch:
                self._send(announcer, row)
                sent = row.position or sent
                if time.monotonic() > until:
                    break
        finally:
            if sent > last:
                reach("after_announce")
                events.published(self._store, sent)
            events.let_go(self._store, self._worker_id)
        return len(batch) == _PUBLISHED_MAX or sent < max((row.position or 0 for row in batch), default=0)

    def _send(self, announcer: topics.Announcer, row: EventView) -> None:
        found = event_of(row, row.position or 0)
        key = topics.routing_key(found.kind, found.tenant, found.graph)
        body = messages.event(found, size_max=self._settings.message_bytes_max)
        announcer.publish(body, key, correlation_id=str(found.id), message_id=str(found.id), type=found.kind)

    def _connected(self) -> topics.Announcer:
        self._connection = broker.connection(
            self._settings.broker, commands=True, queue=self._settings.queue, timeout_seconds=_OPERATION_SECONDS_MAX
        )
        producer = Producer(self._connection.channel(), auto_declare=False)
        self._announcer = topics.Announcer(producer, self._settings.queue)
        return self._announcer

    def _hang_up(self) -> None:
        connection, self._connection, self._announcer = self._connection, None, None
        hang_up(connection, "events_close_failed")

    def finish(self) -> None:
        """Close the connection."""
        self._hang_up()
