"""Whether an attempt is still wanted, for nodes that work for long without doing anything outside.

An effect, an event or a result of an attempt that was cancelled or replaced is refused by the fence anyway; a node that
computes for minutes would learn of it only at its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from keepstep.errors import StaleLease, Unavailable
from keepstep.runtime.watchdog import undisturbed
from keepstep.store import leases
from keepstep.store.engine import Store
from keepstep.store.leases import Fence

_LOOK_SECONDS = 1.0


class LeaseLook:
    """Looks whether a lease is held, at most once a second. Threads of one node may share it."""

    def __init__(self, store: Store, fence: Fence, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._fence = fence
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = clock()
        self._is_lost = False

    def check(self) -> None:
        """Raise `StaleLease` when the attempt is not wanted any more; say nothing while nobody can be asked."""
        with undisturbed(), self._lock:
            if not self._is_lost and self._clock() >= self._look_at:
                self._look_at = self._clock() + _LOOK_SECONDS
                try:
                    self._is_lost = not leases.is_held(self._store, self._fence)
                except Unavailable:
                    return
        if self._is_lost:
            raise StaleLease
