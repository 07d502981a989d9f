"""Room: how many nudges the queues should hold; the rest of what is due waits in its rows (`store/admission.py`).

A queue holds enough that no pool child waits for the next look, and not much more: what lies in it is in order already,
and a tenant who comes now stands behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from keepstep.store.leases import Nudge
from keepstep.tasks.publish import Publisher

_PER_CHILD = 4
_MEASURE_SECONDS = 0.05


class Room:
    """The room in the queues as one worker's main process sees it; safe in threads."""

    def __init__(
        self,
        publisher: Publisher,
        queues: Iterable[str],
        *,
        concurrency: int,
        nudges_max: int,
        withheld: Callable[[Sequence[Nudge]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`withheld` is told the nudges that there is no room for: admission has to find them soon."""
        self._publisher = publisher
        self._withheld = withheld
        self._clock = clock
        self._lock = threading.Lock()
        self._least = min(_PER_CHILD * concurrency, nudges_max)
        self._most = nudges_max
        self._wanted = dict.fromkeys(queues, self._least)
        self._filled: set[str] = set()
        self._left: dict[str, int] = {}
        self._measured_at: dict[str, float] = {}

    def look(self) -> bool:
        """Measure the queues of this worker's graphs; return whether that was possible.

        A queue that was filled at the last look and is empty by now should hold twice as much; one that is still half
        full was given too much.
        """
        with self._lock:
            waiting = self._measure(list(self._wanted))
            if waiting is None:
                return False
            for queue, count in waiting.items():
                wanted = self._wanted[queue]
                if queue in self._filled and count == 0:
                    self._wanted[queue] = min(2 * wanted, self._most)
                elif 2 * count > wanted:
                    self._wanted[queue] = max(self._least, 3 * wanted // 4)
                self._left[queue] = self._wanted[queue] - count
            self._filled.clear()
            return True

    def left(self, queue: str) -> int:
        """Return how many more nudges a queue should hold."""
        return self._left.get(queue, 0)

    def publish(self, nudges: Sequence[Nudge]) -> None:
        """Publish the nudges that there is room for; admission finds the others."""
        with self._lock:
            fits = [self._has_room(nudge.queue) and self._take(nudge.queue) >= 0 for nudge in nudges]
        self._publisher([nudge for nudge, fit in zip(nudges, fits, strict=True) if fit])
        withheld = [nudge for nudge, fit in zip(nudges, fits, strict=True) if not fit]
        if withheld:
            self._withheld(withheld)

    def publish_admitted(self, nudges: Sequence[Nudge]) -> None:
        """Publish nudges that were picked for the room that was left."""
        with self._lock:
            for nudge in nudges:
                self._take(nudge.queue)
        self._publisher(nudges)

    def _has_room(self, queue: str) -> bool:
        if self.left(queue) <= 0 and self._clock() - self._measured_at.get(queue, 0.0) >= _MEASURE_SECONDS:
            self._measure([queue])
        return self.left(queue) > 0

    def _take(self, queue: str) -> int:
        left = self._left[queue] = self.left(queue) - 1
        if left <= 0:
            self._filled.add(queue)
        return left

    def _measure(self, queues: list[str]) -> dict[str, int] | None:
        waiting = self._publisher.waiting(queues)
        now = self._clock()
        for queue in queues:
            self._measured_at[queue] = now
            # Of a broker that cannot be asked nothing is known, and a row that is marked as nudged waits for that.
            self._left[queue] = 0 if waiting is None else self._wanted.get(queue, self._least) - waiting[queue]
        return waiting
