"""What threads that wait for people cost, and how fast a decision gets them going again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

import keepstep
from benchmarks.contestants import Keepstep, Servers, Worker
from keepstep.runtime.reader import Reader
from keepstep.settings import Settings, load

_WARM = 300
_LONE_DECISIONS = 100
_SETTLED_SECONDS = 3.0
_START_SECONDS = 300.0
_MIB = 1024 * 1024


@dataclass(frozen=True)
class Waiting:
    """What was found."""

    threads: int
    """That wait, each on an approval."""
    messages: int
    """In the queues of nudges meanwhile."""
    connections_delta: int
    """Of PostgreSQL, over an idle worker's."""
    rss_delta_mib: float
    """Of all the worker's processes, over an idle worker's."""
    decision_to_running_ms_p50: float
    """From a decision's commit to the node's next line after `ctx.approve`, one at a time."""
    at_once: int
    """Decisions that were then sent at once."""
    applied_once: int
    """Of these, how many have made their thread run on, once."""
    at_once_seconds: float


def waiting(servers: Servers, *, threads: int, at_once: int) -> Waiting:
    """Let that many threads wait, decide some of them one by one, and then many at once."""
    contestant = _Asking(servers)
    servers.redis.flush()
    worker = Worker(contestant, servers.folder / "asking.log")
    try:
        return _measured(contestant, worker, threads=threads, at_once=at_once)
    finally:
        worker.stop()
        contestant.close()


class _Asking(Keepstep):
    name = "asking"

    def __init__(self, servers: Servers) -> None:
        super().__init__(servers)
        graphs = str(Path(__file__).parent / "asking.py")
        self.environment["KEEPSTEP_GRAPHS"] = graphs
        self.settings: Settings = load(
            broker=servers.redis.url, database=servers.postgresql.url(self.database), graphs=graphs
        )
        self._redis = redis.Redis.from_url(servers.redis.url)

    def ask(self, client: keepstep.Client, prefix: str, count: int) -> None:
        """Start threads; they are accepted when this returns."""
        receipts = [client.start("asking", f"{prefix}-{number}", {}) for number in range(count)]
        for receipt in receipts:
            receipt.accepted(timeout=_START_SECONDS)

    def counted(self, status: str) -> int:
        """Return how many threads have a status."""
        return int(self.query(f"SELECT count(*) FROM keepstep_thread WHERE status = '{status}'")[0][0])  # noqa: S608

    def approvals(self) -> list[str]:
        """Return the ids of open approvals, the oldest first."""
        rows = self.query("SELECT id FROM keepstep_approval WHERE status = 'open' ORDER BY created_at, id")
        return [str(row[0]) for row in rows]

    def nudges(self) -> int:
        """Return how many nudges are in Redis."""
        keys = [key for key in self._redis.keys("keepstep.*@*") if self._redis.type(key) == b"list"]  # type: ignore[union-attr]  # redis-py types sync and async as one
        return sum(int(self._redis.llen(key)) for key in keys)  # type: ignore[arg-type]  # the same

    def connections(self) -> int:
        """Return how many clients of PostgreSQL are connected to this database."""
        name = self.database
        query = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND backend_type = 'client backend'"  # noqa: S608
        return int(self.query(query)[0][0])

    def close(self) -> None:
        """Close connections, drop the database."""
        self._redis.close()
        super().close()


def _measured(contestant: _Asking, worker: Worker, *, threads: int, at_once: int) -> Waiting:
    with keepstep.Client(settings=contestant.settings, timeout=60.0) as client:
        contestant.ask(client, "warm", _WARM)
        worker.until(lambda: contestant.counted("waiting") == _WARM, seconds=60, what="the first threads wait")
        _decide(client, contestant.approvals())
        worker.until(lambda: contestant.counted("done") == _WARM, seconds=60, what="the first threads are done")
        time.sleep(_SETTLED_SECONDS)
        connections, memory = contestant.connections(), worker.memory_bytes()

        contestant.ask(client, "asked", threads)
        worker.until(
            lambda: contestant.counted("waiting") == threads, seconds=_START_SECONDS, what=f"{threads} threads wait"
        )
        time.sleep(_SETTLED_SECONDS)
        messages = contestant.nudges()
        connections_delta = contestant.connections() - connections
        rss_delta = (worker.memory_bytes() - memory) / _MIB

        asked = contestant.approvals()
        alone, together = asked[:_LONE_DECISIONS], asked[_LONE_DECISIONS:][:at_once]
        latency = _one_by_one(contestant, worker, client, alone)
        done = _WARM + len(alone)
        begun = time.monotonic()
        _decide(client, together)
        worker.until(
            lambda: contestant.counted("done") >= done + len(together), seconds=_START_SECONDS, what="all have run on"
        )
        seconds = time.monotonic() - begun
    return Waiting(
        threads, messages, connections_delta, rss_delta, latency, len(together), _applied(contestant, together), seconds
    )


def _decide(client: keepstep.Client, approvals: Sequence[str]) -> None:
    for receipt in [client.approve(approval, by="somebody") for approval in approvals]:
        receipt.accepted(timeout=_START_SECONDS)


def _one_by_one(contestant: _Asking, worker: Worker, client: keepstep.Client, approvals: Sequence[str]) -> float:
    """Return the median of the milliseconds from a decision's commit to the node running on."""
    reader = Reader(settings=contestant.settings)
    found = []
    for approval in approvals:
        query = f"SELECT thread_id FROM keepstep_approval WHERE id = '{approval}'"  # noqa: S608  an id of ours
        thread_id = str(contestant.query(query)[0][0])
        client.approve(approval, by="somebody").accepted(timeout=60)
        worker.until(lambda thread=thread_id: reader.get(thread).status == "done", seconds=60, what="it runs on")  # type: ignore[misc]  # mypy infers no default's type
        ran_at = reader.state(thread_id)["ran_at"]
        query = f"SELECT at FROM keepstep_decision WHERE approval_id = '{approval}'"  # noqa: S608  the same
        found.append((ran_at - float(contestant.query(query)[0][0])) * 1000)
    return statistics.median(found)


def _applied(contestant: _Asking, approvals: Sequence[str]) -> int:
    """Return how many of the decided threads have one decision, and one step after it."""
    listed = ", ".join(f"'{approval}'" for approval in approvals)
    query = f"""
    SELECT count(*) FROM keepstep_approval a WHERE a.id IN ({listed}) AND a.status = 'approved'
      AND (SELECT count(*) FROM keepstep_decision d WHERE d.approval_id = a.id) = 1
      AND (SELECT count(*) FROM keepstep_checkpoint c WHERE c.thread_id = a.thread_id AND c.kind = 'step') = 1
    """  # noqa: S608  ids of ours
    return int(contestant.query(query)[0][0])
