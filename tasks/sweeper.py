"""Every worker sweeps: no leader, no beat process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import structlog

from keepstep.crashpoints import reach
from keepstep.settings import Settings
from keepstep.store import sweep, workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge
from keepstep.tasks.carried import Key
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")


class Sweeper(Service):
    """Finds due threads that nobody runs, and nudges them again."""

    name = "sweeper"

    def __init__(
        self,
        settings: Settings,
        carried: Sequence[Key],
        worker_id: str,
        liveness: Liveness,
        publish: Callable[[Sequence[Nudge]], None],
    ) -> None:
        super().__init__()
        self._settings = settings
        self._carried = workers.carried_text(carried)
        self._worker_id = worker_id
        self._liveness = liveness
        self._publish = publish
        self._store = Store.open(settings.database, pool_size=1)

    def work(self) -> float:
        """Sweep once; go on at once while there is a full batch."""
        with self.gate.hold():
            nudges = sweep.sweep(
                self._store,
                carried=self._carried,
                takeover=self._liveness.may_take_over,
                limit=self._settings.sweep_batch,
                judge=self._worker_id,
            )
            if nudges:
                reach("after_sweep")
            self._publish(nudges)
        if nudges:
            log.info("swept", worker_id=self._worker_id, nudged=len(nudges))
        if len(nudges) >= self._settings.sweep_batch:
            return 0.0
        # Jittered, so that the workers of a fleet do not all look at the same moment.
        return self._settings.sweep_seconds * random.uniform(0.7, 1.3)  # noqa: S311  not a secret

    def finish(self) -> None:
        """Close the connection."""
        self._store.dispose()
