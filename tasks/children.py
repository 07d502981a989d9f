"""A pool child that died gives its leases back at once: nobody waits for a liveness window."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from keepstep.settings import Settings
from keepstep.store import workers
from keepstep.store.engine import Store
from keepstep.store.leases import Nudge
from keepstep.tasks.service import Service

log = structlog.get_logger("keepstep.worker")

_LOOK_SECONDS = 0.1
# 155 is how billiard's children say that they have done their number of tasks.
_ORDINARY = ("exit code 0", "exit code 155")


class Children(Service):
    """Watches the pool's processes and releases what a dead one held."""

    name = "children"
    failed_seconds = 0.5

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        processes: Callable[[], Iterable[Any]],
        publish: Callable[[Sequence[Nudge]], None],
    ) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._processes = processes
        self._publish = publish
        self._store = Store.open(settings.database, pool_size=1)
        # By the process object, not by pid alone: it remembers how it ended after the pool has collected it.
        self._watched: dict[int, Any] = {}
        self._ended: set[int] = set()

    def watch(self, process: Any) -> None:
        """Watch a child from its start: one that lives for less than a look would be seen by none."""
        self._watched[process.pid] = process

    def work(self) -> float:
        """Find children that ended since the last look, and release their leases."""
        present = {process.pid: process for process in self._processes() if process.pid}
        # A pid that the pool has let go of may come back as another child's.
        self._ended &= present.keys()
        self._watched.update({pid: process for pid, process in present.items() if pid not in self._ended})
        for pid, process in list(self._watched.items()):
            ending = _ending(process)
            # A child that was started during this look is not in its list.
            if ending is None and (pid in present or _exists(pid)):
                continue
            self._release(pid, ending or "it is gone")
            del self._watched[pid]
            if pid in present:
                self._ended.add(pid)
        return _LOOK_SECONDS

    def finish(self) -> None:
        """Close the connection."""
        self._store.dispose()

    def _release(self, pid: int, ending: str) -> None:
        with self.gate.hold():
            nudges = workers.release_child(self._store, self._worker_id, pid, reason=ending)
            if nudges or ending not in _ORDINARY:
                log.warning("child_lost", worker_id=self._worker_id, pid=pid, reason=ending, released=len(nudges))
            self._publish(nudges)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _ending(process: Any) -> str | None:
    """Say how a child ended, None while it lives. Looks only: collecting it is the pool's part."""
    code: int | None = process._popen.returncode if process._popen is not None else None  # noqa: SLF001
    if code is None and hasattr(os, "waitid"):
        try:
            seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # being collected at this moment: the next look finds the code
            return None
        if seen is not None:
            code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
    if code is None:
        return None
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
