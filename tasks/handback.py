"""No nudge waits for long in a worker that has no free child for it.

A worker fetches a few nudges more than it can run, so that a child that ends a step has the next one at once: fetching
only then leaves children idle for a third of the time. But a nudge that was fetched ahead must not lie behind a node of
hours while another worker has nothing to do. One that has waited for a moment is published again, for whoever is free,
and dropped here when its turn comes. Nudges are hints, so should both be run, the second finds nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from celery.worker import state

from keepstep.store.leases import Nudge
from keepstep.tasks.config import NODE_TASK, STEP_TASK
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")

_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 0.1


class HandBack(Service):
    """Publishes nudges again that wait for a child of this worker."""

    name = "handback"

    def __init__(self, publish: Callable[[Sequence[Nudge]], None]) -> None:
        super().__init__()
        self._publish = publish
        self._since: dict[str, float] = {}
        self._handed_back: set[str] = set()

    def work(self) -> float:
        """Look once at what waits."""
        # A list first: Celery's loop changes these sets meanwhile, in its own thread.
        waiting = {request.id: request for request in list(state.reserved_requests) if _is_waiting(request)}
        now = time.monotonic()
        self._since = {task_id: self._since.get(task_id, now) for task_id in waiting}
        self._handed_back &= waiting.keys()
        overdue = [
            task_id
            for task_id, since in self._since.items()
            if now - since >= _PATIENCE_SECONDS and task_id not in self._handed_back
        ]
        if overdue:
            with self.gate.hold():
                # It keeps its place among those fetched ahead until its turn comes, so no other is fetched for it.
                state.revoked.update(overdue)
                self._publish([_nudge_of(waiting[task_id]) for task_id in overdue])
            self._handed_back.update(overdue)
            log.debug("nudges_handed_back", count=len(overdue))
        return _LOOK_SECONDS


def _is_waiting(request: Any) -> bool:
    return request.name in {STEP_TASK, NODE_TASK} and request not in state.active_requests


def _nudge_of(request: Any) -> Nudge:
    if request.name == NODE_TASK:
        thread_id, seq, run, version = request.args
        return Nudge("node", thread_id, version, seq, run)
    thread_id, version = request.args
    return Nudge("step", thread_id, version)
