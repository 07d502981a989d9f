"""The sweep: what only the time, or somebody's death, makes due.

Every worker sweeps, jittered; there is no leader. Which of the rows that are due are nudged next is `admission`'s.
"""

from __future__ import annotations

from keepstep.store import errands, firing, rates, reminders, waits, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge


def sweep(store: Store, *, takeover: bool, limit: int, judge: str | None = None) -> list[Nudge]:
    """Answer what the time has answered, fire schedules, give up dead workers; return the nudges of what that made due.

    People who have not answered are reminded, and what rates remember is forgotten when it says nothing any more.
    `takeover` False leaves the leases of silent workers alone (see `Liveness`: a worker that was itself cut off must
    not judge others), and so does `judge`, the worker that sweeps, while its own time is over; at most `limit` waits
    are answered. What is returned need not be published: all of it is due, and admission finds it.
    """
    nudges = waits.fire_due(store, limit=limit)
    reminders.remind_due(store, limit=limit)
    nudges += errands.finish_due(store, limit=limit)
    nudges += firing.fire_due(store, limit=limit)
    if takeover:
        nudges += workers.take_over(store, judge=judge)
        nudges += workers.adopt_orphans(store)
    rates.forget_idle(store, limit=limit)
    return nudges
