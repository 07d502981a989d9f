"""Rates: how often a tool may be called, as its declaration says it, and who asks before a call."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from keepstep.errors import DatabaseUnavailable, InvalidInput
from keepstep.store import rates
from keepstep.store.engine import Store

log = structlog.get_logger("keepstep.step")

_RATE = re.compile(r"\s*(\d{1,9})\s*/\s*(\d{1,9}(?:\.\d{1,6})?)?\s*([smhd])\s*", re.ASCII)
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_CALLS_MAX = 1_000_000
_PER_SECONDS_MAX = 86400.0
_READ_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """So many calls in so many seconds: up to `calls` of them at once, and evenly from then on."""

    calls: int
    per_seconds: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Return the rate that a text names: `10/s`, `20/m`, `1000/h`, `2/d`, `5/10s`; raise `InvalidInput` else."""
        found = _RATE.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            message = f"rate {text!r:.80}: write calls/time as in 10/s, 20/m, 1000/h or 5/10s (s, m, h or d)"
            raise InvalidInput(message)
        number, count, unit = found.groups()
        calls, per_seconds = int(number), float(count or 1) * _UNITS[unit]
        if not 1 <= calls <= _CALLS_MAX:
            message = f"rate {text!r:.80}: {calls} calls; at least 1 and at most {_CALLS_MAX}"
            raise InvalidInput(message)
        if not 0 < per_seconds <= _PER_SECONDS_MAX:
            message = f"rate {text!r:.80}: a time of {per_seconds:g} s; longer than 0 and at most a day"
            raise InvalidInput(message)
        return cls(calls, per_seconds)

    @property
    def burst(self) -> int:
        """How many calls may be made at once, after a pause."""
        return self.calls

    def __str__(self) -> str:
        """Return the rate as `parse` reads it."""
        return f"{self.calls}/{self.per_seconds:g}s"


class Rates:
    """Asks before a call whether it may be made now. Threads may share it; never shared across a fork.

    A tool without a rate costs nothing: whether it was asked for a pause is read for all tools at once, and no more
    often than once a second, so another process's 429 is heeded within a second.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[tuple[str, str], float] = {}
        """By (tenant, tool), until when by this process's clock."""
        self._read_at: float | None = None

    def take(self, tenant: str, name: str, rate: Rate | None) -> float:
        """Return 0.0 when a tenant may call a tool now, the call counted; else the seconds after which to ask again.

        `name` is the tool's, or that of whatever else has a rate; `rate` None: it has none, and only pauses are heeded.
        Raises `DatabaseUnavailable` when a rate cannot be asked about.
        """
        if rate is not None:
            return rates.take(self._store, tenant=tenant, name=name, calls=rate.calls, per_seconds=rate.per_seconds)
        now = self._clock()
        self._read(now)
        return max(0.0, self._held.get((tenant, name), now) - now)

    def hold_off(self, tenant: str, name: str, seconds: float) -> None:
        """Let nobody of this tenant call this tool for some seconds, at most a day: it said that it is too much."""
        rates.hold_off(self._store, tenant=tenant, name=name, seconds=seconds)
        until = self._clock() + min(seconds, rates.HOLD_SECONDS_MAX)
        with self._lock:
            self._held = {**self._held, (tenant, name): max(until, self._held.get((tenant, name), until))}

    def _read(self, now: float) -> None:
        with self._lock:
            if self._read_at is not None and now - self._read_at < _READ_AGAIN_SECONDS:
                return
            self._read_at = now  # before it is known: whoever comes meanwhile goes by what was known
        try:
            found = rates.holds(self._store)
        except DatabaseUnavailable as error:  # what is known holds until it has passed
            log.debug("holds_not_read", reason=error.message)
            return
        with self._lock:
            known = {key: until for key, until in self._held.items() if until > now}
            self._held = {**known, **{key: now + left for key, left in found.items()}}
