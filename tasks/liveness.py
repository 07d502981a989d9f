"""A worker is alive because the database saw it lately."""

from __future__ import annotations

import time

import structlog

from keepstep.settings import Settings
from keepstep.store import workers
from keepstep.store.engine import Store
from keepstep.tasks.registration import Registration
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")


# How far the database's clock may stray from ours between two renewals before it counts as having been set.
_CLOCK_SLACK_SECONDS = 1.0


class Liveness(Service):
    """Renews the worker's row from a thread and a connection of its own: no node and no slow sweep delays it."""

    name = "liveness"

    def __init__(self, settings: Settings, registration: Registration) -> None:
        super().__init__()
        self._settings = settings
        self._registration = registration
        self._store = Store.open(settings.database, pool_size=1)
        self._window = settings.liveness_window_seconds
        # After an outage, a restart of the database or a change of its clock every worker's row has run out at once,
        # and each would find all the others dead. So a worker takes over from nobody until it has renewed without a
        # gap for a window, in which the living show themselves.
        self._steady_since = self._renewed_at = time.monotonic()
        self._database_ahead: tuple[float, float] | None = None
        self._clock_skew: float | None = None
        self.failed_seconds = min(settings.renew_seconds, 1.0)

    @property
    def may_take_over(self) -> bool:
        """Whether this worker has renewed without a gap for one liveness window."""
        now = time.monotonic()
        return now - self._renewed_at < self._window <= now - self._steady_since

    def work(self) -> float:
        """Renew once."""
        try:
            with self.gate.hold():
                asked, asked_at = time.monotonic(), time.time()
                database_time = workers.renew(
                    self._store,
                    self._registration.worker_id,
                    window_seconds=self._window,
                    clock_skew=self._clock_skew,
                )
                now, told_at = time.monotonic(), time.time()
                if database_time is None:
                    self._registration.register(self._store)
        except Exception:
            self._steady_since = time.monotonic()
            raise
        self._judge(asked, now, database_time)
        self._clock_skew = None if database_time is None else _skew(database_time, asked_at, told_at)
        self._renewed_at = now
        return self._settings.renew_seconds

    def finish(self) -> None:
        """Close the connection."""
        self._store.dispose()

    def _judge(self, asked: float, now: float, database_time: float | None) -> None:
        """Begin the window again when there was a gap."""
        # How far the database's clock is ahead of ours lies between these two: it was read in between.
        ahead = None if database_time is None else (database_time - now, database_time - asked)
        was_set = ahead is not None and self._database_ahead is not None and _apart(ahead, self._database_ahead)
        self._database_ahead = ahead
        if database_time is None:
            log.warning("worker_was_given_up", worker_id=self._registration.worker_id)
        elif was_set:
            log.warning("database_clock_was_set", worker_id=self._registration.worker_id)
        if database_time is None or was_set or now - self._renewed_at > self._window:
            self._steady_since = now


def _skew(database_time: float, before: float, after: float) -> float:
    """Return how far this clock is surely ahead of the database's (below zero: behind), which was read in between."""
    return before - database_time if before > database_time else min(after - database_time, 0.0)


def _apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return max(one[0], other[0]) - min(one[1], other[1]) > _CLOCK_SLACK_SECONDS
