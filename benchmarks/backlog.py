"""What a look at the due rows costs when there are a hundred of them, and when there are a hundred thousand."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass

from benchmarks.contestants import Servers
from keepstep.ids import new_id
from keepstep.store import threads
from keepstep.store.admission import Admission
from keepstep.store.engine import Store
from keepstep.store.threads import NewRun

FEW, MANY = 100, 100_000
_LOOKS = 40
_ROOM = 16
_COPIED = (
    "tenant, application, agent, graph_version, status, seq, snapshot_seq, version, queue, priority, due_at, "
    "lease_seconds, created_at, updated_at"
)
# Of one tenant, and all nudged long ago.
_CLONE = f"""
INSERT INTO keepstep_thread (id, name, next_nudge_at, {_COPIED})
SELECT 'thread' || n, 'thread' || n, due_at, {_COPIED} FROM keepstep_thread, generate_series(2, {{count}}) n
"""  # noqa: S608  constants


@dataclass(frozen=True)
class Looks:
    """The median of one look that admits 16 threads, in milliseconds."""

    of_few: float
    of_many: float


def looks(servers: Servers) -> Looks:
    """Measure with 100 and with 100,000 due threads."""
    return Looks(*(_look(servers, count) for count in (FEW, MANY)))


def _look(servers: Servers, count: int) -> float:
    with contextlib.closing(_Backlog(servers, count)) as backlog:
        return statistics.median(backlog.look() for _ in range(_LOOKS))


class _Backlog:
    def __init__(self, servers: Servers, count: int) -> None:
        self._store = Store.open(servers.postgresql.url(servers.migrated_database()))
        with self._store.transaction() as transaction:
            threads.create(
                transaction,
                thread_id=new_id(),
                tenant="flood",
                application="default",
                agent="agent",
                name="first",
                graph_version="1",
                priority=1,
                lease_seconds=60.0,
                first=NewRun(new_id(), new_id(), b"", b"", None),
            )
        with self._store.engine.connect() as connection:
            connection.exec_driver_sql(_CLONE.format(count=count))
            connection.exec_driver_sql("ANALYZE keepstep_thread")
        self._admission = Admission(self._store, [("agent", "1")])

    def look(self) -> float:
        """Let 16 threads in; return how many milliseconds that took. They are due again at once."""
        begun = time.perf_counter()
        admitted = self._admission.look(lambda _queue: _ROOM, {})
        took = (time.perf_counter() - begun) * 1000
        if len(admitted.nudges) != _ROOM:
            message = f"{len(admitted.nudges)} threads were let in"
            raise RuntimeError(message)
        with self._store.engine.connect() as connection:
            connection.exec_driver_sql("UPDATE keepstep_thread SET next_nudge_at = due_at WHERE next_nudge_at > due_at")
        return took

    def close(self) -> None:
        """Close the connection."""
        self._store.dispose()
