"""Celery's consumer without the parts that talk to other workers: they find each other in the database."""

from __future__ import annotations

import functools
from typing import Any

from celery.worker.consumer import Consumer
from kombu import Connection

from keepstep.tasks.handouts import Handouts

_QUIET = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}


class NudgeConsumer(Consumer):
    """Consumes nudges: no gossip, no mingle, no heartbeat events (a third of the cost of a hop), quick to reconnect."""

    def __init__(self, *args: Any, worker_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, worker_options={**(worker_options or {}), **_QUIET}, **kwargs)

    def ensure_connected(self, conn: Connection) -> Connection:
        """Connect, trying again for ever; Celery's own back-off grows to half a minute, in which nothing would run."""
        conn.ensure_connection = functools.partial(
            conn.ensure_connection, interval_start=0.2, interval_step=0.4, interval_max=3
        )
        return super().ensure_connected(conn)

    def register_with_event_loop(self, hub: Any) -> None:
        """Begin with a connection that was made."""
        super().register_with_event_loop(hub)
        if self.connection.transport.driver_type == "amqp":
            Handouts(self, hub)
