"""Every worker sweeps: no leader, no beat process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable

import structlog

from keepstep.crashpoints import reach
from keepstep.runtime import responsespool
from keepstep.runtime.compiled import CompiledGraph
from keepstep.runtime.limits import RunningMax
from keepstep.settings import Settings
from keepstep.store import sweep
from keepstep.store.admission import Admission, Admitted
from keepstep.store.engine import Store
from keepstep.tasks.liveness import Liveness
from keepstep.tasks.room import Room
from keepstep.tasks.service import Service

_LOOK_SECONDS = 0.1
"""How soon to look again while there is more due than the queues should hold."""
_HELD_BACK_SECONDS = 0.5
"""And while as much runs as may: whoever ends a step lets the next one in, this is for those who died."""

log = structlog.get_logger("keepstep.worker")


class Sweeper(Service):
    """Finds due threads that nobody runs, and nudges as many of them as the queues have room for."""

    name = "sweeper"

    def __init__(
        self, settings: Settings, graphs: Iterable[CompiledGraph], worker_id: str, liveness: Liveness, room: Room
    ) -> None:
        super().__init__()
        carried = list(graphs)
        self._settings = settings
        self._worker_id = worker_id
        self._liveness = liveness
        self._room = room
        self._store = Store.open(settings.database, pool_size=1)
        self._admission = Admission(self._store, [(graph.name, graph.version) for graph in carried])
        self._running_max = RunningMax(self._store, carried)
        self._sweep_at = time.monotonic()
        self._responses = responsespool.of_settings(settings)

    def work(self) -> float:
        """Sweep when it is time, and let in what is due; return how soon to look again."""
        with self.gate.hold():
            now = time.monotonic()
            if now >= self._sweep_at:
                self._sweep(now)
            admitted = self._admit()
        if admitted.more:
            return _LOOK_SECONDS
        until_sweep = max(0.0, self._sweep_at - time.monotonic())
        return min(_HELD_BACK_SECONDS, until_sweep) if admitted.held_back else until_sweep

    def _sweep(self, now: float) -> None:
        limit = self._settings.sweep_batch
        nudges = sweep.sweep(self._store, takeover=self._liveness.may_take_over, limit=limit, judge=self._worker_id)
        if nudges:
            reach("after_sweep")
            log.info("swept", worker_id=self._worker_id, nudged=len(nudges))
        self._room.publish(nudges)
        if self._responses is not None:
            self._responses.sweep_sometimes()
        if len(nudges) < limit:
            # Jittered, so that the workers of a fleet do not all look at the same moment.
            self._sweep_at = now + self._settings.sweep_seconds * random.uniform(0.7, 1.3)  # noqa: S311  not a secret

    def _admit(self) -> Admitted:
        if not self._room.look():
            return Admitted()
        admitted = self._admission.look(self._room.left, self._running_max())
        if admitted.nudges:
            reach("after_admission")
            log.info("admitted", worker_id=self._worker_id, nudged=len(admitted.nudges))
        self._room.publish_admitted(admitted.nudges)
        return admitted

    def finish(self) -> None:
        """Close the connection."""
        self._store.dispose()
