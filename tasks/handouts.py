"""What RabbitMQ hands out ahead: no nudge lies in a worker behind a long node.

Such a nudge would keep others from its thread until a sweep finds the row. And it would not be acknowledged: after its
`consumer_timeout` (half an hour) RabbitMQ closes the channel. Acknowledging late, or not at all, is no better: the one
has the same time-out for every node that is longer, the other fetches the whole queue.
"""

from __future__ import annotations

from typing import Any

from celery.bootsteps import RUN
from celery.worker import state

_LOOK_SECONDS = 0.1
"""A nudge that waits longer than this for a child is put back."""
_PAUSED_LOOK_SECONDS = 0.02


class Handouts:
    """Stops a consumer while every child is busy, and puts back what it has fetched meanwhile.

    Nothing is stopped for nodes that are shorter than a look: their next nudge is then there already.
    """

    def __init__(self, consumer: Any, hub: Any) -> None:
        """`consumer`: Celery's, which has just been connected; `hub`: its event loop."""
        self._consumer = consumer
        self._hub = hub
        self._tasks: Any = consumer.task_consumer
        self._paused = False
        self._waited: frozenset[int] = frozenset()
        hub.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        consumer = self._consumer
        # After a lost connection there is another consumer of tasks, and another of these.
        if consumer.blueprint.state != RUN or consumer.task_consumer is not self._tasks:
            return
        # Again also when what follows fails: the loop then ends with the connection, or goes on.
        self._hub.call_later(_PAUSED_LOOK_SECONDS if self._paused else _LOOK_SECONDS, self._look)
        waiting = [request for request in state.reserved_requests if not request.acknowledged]
        waited, self._waited = self._waited, frozenset(map(id, waiting))
        busy = len(state.active_requests) >= consumer.pool.num_processes
        if busy and not waited.isdisjoint(self._waited):
            self._pause()
        elif self._paused and not busy:
            self._tasks.consume()
            self._paused = False

    def _pause(self) -> None:
        """Let no more be delivered, then put back what was: who is not busy takes it."""
        self._tasks.cancel()
        self._paused = True
        for request in [request for request in state.reserved_requests if not request.acknowledged]:
            request.reject(requeue=True)
            state.reserved_requests.discard(request)
            state.requests.pop(request.id, None)
        semaphore = self._consumer.controller.semaphore
        # One that the pool has in hand already may still come to run, here and elsewhere: it is only a hint.
        if semaphore is not None:
            semaphore._waiting.clear()  # noqa: SLF001  `clear` would also forget who is busy
