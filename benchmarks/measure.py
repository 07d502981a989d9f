"""What is measured: steps per second in a window of time, the latency of hops, and what a step costs the servers."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contestants import Contestant, Keepstep, Servers, Worker, working

_TABLES = "SELECT oid FROM pg_class WHERE relname LIKE 'keepstep%' AND relkind = 'r'"
_STORED = f"SELECT sum(pg_total_relation_size(oid)) FROM ({_TABLES}) AS tables"  # noqa: S608  constants
_PAYLOAD = """
SELECT avg(coalesce(octet_length(change), 0) + coalesce(octet_length(snapshot), 0) + octet_length(cursor)
           + octet_length(meta) + octet_length(digest) + octet_length(parent_digest))
FROM keepstep_checkpoint WHERE kind = 'step'
"""
_HOPS = """
SELECT (created_at - lag(created_at) OVER (PARTITION BY thread_id ORDER BY seq)) * 1000
FROM keepstep_checkpoint WHERE kind = 'step' AND created_at > {since}
"""
_STATEMENTS = """
SELECT coalesce(sum(calls), 0) FROM pg_stat_statements JOIN pg_database ON pg_database.oid = dbid
WHERE datname = current_database() AND query NOT LIKE '%pg_stat_statements%' AND query NOT LIKE '%pg_total_relation%'
  AND query NOT LIKE 'SELECT coalesce(sum(seq)%'
"""
# Of the processes that serve clients: a flush that somebody waits for. The WAL writer's are in the background.
_FLUSHES = "SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal' AND backend_type = 'client backend'"
_TRANSACTIONS = "SELECT xact_commit FROM pg_stat_database WHERE datname = '{name}'"


@dataclass(frozen=True)
class Rate:
    """A contestant's steps in one window."""

    steps_per_second: float
    processor_microseconds: float
    """Of the worker's processes, per step."""


@dataclass(frozen=True)
class Hops:
    """The time from the commit of one step to the commit of the thread's next, in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Cost:
    """What one step costs."""

    statements: float
    """Sent to PostgreSQL; BEGIN and COMMIT count. With what the worker does besides: renewing, sweeping."""
    messages: float
    """Put into a queue."""
    stored_bytes: float
    """Growth of the tables, their indexes, free space and dead rows included."""
    payload_bytes: float
    """In the checkpoint's payload columns."""


@dataclass(frozen=True)
class Lone:
    """One thread on an idle worker."""

    hops: Hops
    flushes: float
    """Times per step that a commit waited for the disk."""
    transactions: float


def _counted(worker: Worker, contestant: Contestant, seconds: float) -> Rate:
    started, steps, used = time.monotonic(), contestant.steps(), worker.processor_seconds()
    time.sleep(seconds)
    done = contestant.steps() - steps
    elapsed = time.monotonic() - started
    return Rate(done / elapsed, (worker.processor_seconds() - used) / max(done, 1) * 1e6)


def rate(contestant: Contestant, *, chains: int, warm_up_seconds: float, seconds: float) -> tuple[Rate, Hops | None]:
    """Return how fast a contestant's chains go on; of Keepstep also the latency of the hops meanwhile."""
    with working(contestant, chains=chains) as worker:
        time.sleep(warm_up_seconds)
        if not isinstance(contestant, Keepstep):
            return _counted(worker, contestant, seconds), None
        since = _database_time(contestant)
        counted = _counted(worker, contestant, seconds)
        return counted, _hops(contestant, since)


def _database_time(contestant: Keepstep) -> float:
    return float(contestant.query("SELECT extract(epoch FROM clock_timestamp())")[0][0])


def _hops(contestant: Keepstep, since: float) -> Hops:
    found = sorted(ms for (ms,) in contestant.query(_HOPS.format(since=since)) if ms is not None)
    return Hops(*(quantile(found, part) for part in (0.5, 0.99)))


def quantile(ordered: Sequence[float], part: float) -> float:
    """Return the value below which that part of some sorted values lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def lone(servers: Servers, *, steps: int) -> Lone:
    """Run one thread to its end on an idle worker."""
    contestant = Keepstep(servers, until=steps)
    transactions = _TRANSACTIONS.format(name=contestant.database)
    execute = servers.postgresql.execute
    before = [_number(execute(query)) for query in (_FLUSHES, transactions)]
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(working(contestant, chains=1))
        worker.until(lambda: contestant.steps() >= steps, seconds=60.0, what=f"{steps} steps of one thread")
        hops = _hops(contestant, 0.0)
        # A server process hands in its numbers when it ends.
        worker.stop()
        flushes, committed = (
            _number(execute(query)) - known for query, known in zip((_FLUSHES, transactions), before, strict=True)
        )
    return Lone(hops, flushes / steps, committed / steps)


def _number(rows: Sequence[Sequence[object]]) -> float:
    return float(str(rows[0][0]))


def cost(servers: Servers, *, chains: int, seconds: float) -> Cost:
    """Count what steps cost, on a server that counts statements; it is restarted for that, before and after."""
    servers.configure("shared_preload_libraries", "pg_stat_statements")
    contestant = Keepstep(servers)
    contestant.query("CREATE EXTENSION pg_stat_statements")
    with working(contestant, chains=chains) as worker, contextlib.closing(servers.redis.client()) as broker:

        def look() -> tuple[float, ...]:
            pushed = broker.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0)  # type: ignore[union-attr]
            queries = (Keepstep.count, _STATEMENTS, _STORED)
            return (float(pushed), *(_number(contestant.query(query)) for query in queries))

        worker.until(lambda: contestant.steps() > 4 * chains, seconds=60.0, what="some steps of each thread")
        before = look()
        time.sleep(seconds)
        messages, steps, statements, stored = (now - then for now, then in zip(look(), before, strict=True))
        payload = _number(contestant.query(_PAYLOAD))
    servers.configure("shared_preload_libraries", None)
    return Cost(statements / steps, messages / steps, stored / steps, payload)


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
