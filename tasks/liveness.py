"""A worker is alive because the database saw it lately."""

from __future__ import annotations

import time

import structlog

from keepstep.errors import KeepstepError
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

    def start(self) -> None:
        """Renew once before anybody takes a lease, so that a clock that is set from then on is noticed; then go on."""
        try:
            self.work()
        except KeepstepError as error:  # it will be tried again at once
            log.warning("not_renewed", reason=error.message)
        super().start()

    def work(self) -> float:
        """Renew once."""
        try:
            with self.gate.hold():
                self._renew()
        except Exception:
            self._steady_since = time.monotonic()
            raise
        return self._settings.renew_seconds

    def finish(self) -> None:
        """Close the connection."""
        self._store.dispose()

    def _renew(self) -> None:
        asked, asked_at = time.monotonic(), time.time()
        ahead: tuple[float, float] | None = None
        set_by = 0.0

        def clock_was_set(database_time: float) -> float:
            nonlocal ahead, set_by
            # How far the database's clock is ahead of ours lies between these two: it was read in between.
            ahead = (database_time - time.monotonic(), database_time - asked)
            set_by = _moved(self._database_ahead, ahead)
            if set_by:
                # Before this renewal can be seen: from then on our own sweep believes our word on the others.
                self._steady_since = time.monotonic()
            return set_by

        worker_id = self._registration.worker_id
        database_time = workers.renew(
            self._store,
            worker_id,
            window_seconds=self._window,
            clock_skew=self._clock_skew,
            clock_was_set=clock_was_set,
        )
        now, told_at = time.monotonic(), time.time()
        self._clock_skew = None if database_time is None else _skew(database_time, asked_at, told_at)
        if database_time is None:
            self._registration.register(self._store)
            log.warning("worker_was_given_up", worker_id=worker_id)
            self._steady_since, self._database_ahead = now, None
            self._renew()  # at once, so that a clock that is set from now on is noticed
            return
        if set_by:
            log.warning("database_clock_was_set", worker_id=worker_id, seconds=round(set_by, 1))
        if set_by < 0:
            workers.catch_up(self._store, window_seconds=self._window)
        if now - self._renewed_at > self._window:
            self._steady_since = now
        self._database_ahead = ahead
        self._renewed_at = now


def _skew(database_time: float, before: float, after: float) -> float:
    """Return how far this clock is surely ahead of the database's (below zero: behind), which was read in between."""
    return before - database_time if before > database_time else min(after - database_time, 0.0)


def _moved(before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Return by how many seconds the database's clock was set between two looks at how far it is ahead of ours."""
    if before is None or max(before[0], now[0]) - min(before[1], now[1]) <= _CLOCK_SLACK_SECONDS:
        return 0.0
    return now[1] - before[0] if now[0] > before[1] else now[0] - before[1]
