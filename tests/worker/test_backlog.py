"""A backlog: 100,000 threads of one tenant are due, and the broker, the workers and another tenant do not feel it."""

from __future__ import annotations

import time

import psutil
import pytest

import keepstep
from keepstep import broker
from tests.worker.deployment import eventually

DUE = 100_000

# Threads that were accepted, and whose nudges are long gone.
_CLONE = """
WITH seed AS (SELECT t.*, r.request_digest, r.input FROM keepstep_thread t JOIN keepstep_run r ON r.thread_id = t.id
              WHERE t.name = 'seed'),
     runs AS (INSERT INTO keepstep_run (id, tenant, thread_id, number, request_id, request_digest, status, input,
                                        steps, created_at)
              SELECT 'run' || n, 'flood', 'thread' || n, 1, 'request' || n, request_digest, 'queued', input, 0,
                     created_at FROM seed, generate_series(1, :count) n)
INSERT INTO keepstep_thread (id, tenant, application, agent, name, graph_version, status, seq, snapshot_seq, version,
    queue, priority, due_at, lease_seconds, next_nudge_at, runs, queued, created_at, updated_at)
SELECT 'thread' || n, 'flood', application, agent, 'flood' || n, graph_version, 'ready', -1, 0, 1,
    queue, priority, due_at, lease_seconds, due_at, 1, 1, created_at, updated_at FROM seed, generate_series(1, :count) n
"""


@pytest.fixture
def flooded(served):
    """A deployment without workers, in which one tenant has 100,000 due threads."""
    worker = served.worker()
    served.client.start("chain", "seed", {})
    served.client.cancel("seed")
    worker.stop()
    assert served.execute(_CLONE, count=DUE) == DUE
    return served


@pytest.fixture
def waiting(flooded):
    """How to count the nudges in the flood's queue."""
    with flooded.looking_at(broker.nudges_queue(flooded.settings.broker, flooded.settings.queue, "chain@1")) as count:
        yield count


@pytest.mark.timeout(300)  # many rows, and some of their steps
def test_a_flood_stays_in_its_rows_and_another_tenant_gets_through(flooded, waiting):
    bound = 64
    worker = flooded.worker(concurrency=2, KEEPSTEP_QUEUE_NUDGES_MAX=str(bound))
    processes = [psutil.Process(pid) for pid in (worker.pid, *worker.children())]
    lengths, sizes = [], []

    def begun(count):
        lengths.append(waiting())
        sizes.append(sum(process.memory_info().rss for process in processes) / 2**20)
        # By what the nodes say: counting 100,000 rows again and again is the machine's work, not the workers'.
        return sum(node == "a" for _, node, *_ in flooded.notes("starts")) >= count

    eventually(lambda: begun(200), what="the flood under way")
    with keepstep.Client(settings=flooded.settings, tenant="other", confirm=True, timeout=20) as client:
        sent = time.monotonic()
        client.start("chain", "a", {})
        flooded.ended("a", seconds=20)
        took = time.monotonic() - sent
    warm = len(sizes)
    eventually(lambda: begun(1200), seconds=150, what="more of the flood")

    rest = flooded.query("SELECT count(*) FROM keepstep_thread WHERE tenant = 'flood' AND seq < 0")[0][0]
    assert rest > DUE / 2, "the flood was over before anything could be seen"
    # What waits ahead of another tenant is what the queue holds, not what is due.
    assert took < 10
    assert max(lengths) <= 2 * bound  # the queue and the steps that follow those that were taken
    assert max(sizes[warm:]) - sizes[warm] < 30
    # Nudged and not begun: as many as the queue holds, and each of them once or twice.
    nudged = flooded.query(
        "SELECT count(*), coalesce(max(nudges), 0) FROM keepstep_thread WHERE seq < 0 AND nudges > 0"
    )[0]
    assert nudged[0] <= 2 * bound
    assert nudged[1] <= 3
