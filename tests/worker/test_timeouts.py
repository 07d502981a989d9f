"""Nodes that overstay their timeout, in each pool: they are written off, act no more, and hold no slot for ever."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.worker.deployment import deployed, eventually

TIMEOUT, GRACE = 0.5, 0.3
"""Of the nodes of `stuck` and `deaf`, and of these deployments."""
RETRY_SECONDS = 60.0
"""Until the second attempt of `deaf`."""
BUSY_MACHINE_SECONDS = 3.0


@pytest.fixture
def hasty(tmp_path, postgresql_url, broker_url):
    with deployed(tmp_path, postgresql_url, broker_url, timeout_grace_seconds=GRACE) as deployment:
        yield deployment


def overstayed(deployment, threads, *, status="failed"):
    """Wait until threads are written off; check of each when and why; return their errors."""

    def rows():
        return deployment.query(
            "SELECT name, status, failures, deaths, error, "
            "CASE status WHEN 'ready' THEN due_at - :delay ELSE updated_at END "
            "FROM keepstep_thread WHERE agent IN ('stuck', 'deaf') AND failures = 1 AND lease_nonce IS NULL",
            delay=RETRY_SECONDS,
        )

    found = eventually(lambda: len(rows()) == len(threads) and rows(), seconds=90, what="the time-outs")
    # Those that were ended along with another one have begun again.
    begun = {words[0]: float(words[-1]) for words in deployment.notes("starts") if words[0] in threads}
    errors = {}
    for name, *is_, error, at in found:
        assert is_ == [status, 1, 0], name
        errors[name] = json.loads(error)
        assert errors[name]["code"] == "node_timeout"
        assert TIMEOUT <= at - begun[name] <= TIMEOUT + GRACE + BUSY_MACHINE_SECONDS, name
    assert set(errors) == set(threads)
    return errors


def healthy_afterwards(deployment):
    threads = [f"healthy-{number}" for number in range(10)]
    deployment.start("quick", *threads)
    deployment.ended(*threads)
    assert {deployment.counts("starts")[f"{thread} once"] for thread in threads} == {1}


@pytest.mark.kill
@pytest.mark.slow
def test_children_that_hang_are_ended_and_replaced(hasty):
    worker = hasty.worker(concurrency=4)
    threads = [f"s{number}" for number in range(12)]
    hasty.start("stuck", *threads)

    errors = overstayed(hasty, threads)
    assert {error["message"] for error in errors.values()} == {
        "node 'sleep_in_c' ran longer than its timeout and did not end when told; its process was ended"
    }
    assert hasty.counts("starts") == Counter({f"{thread} sleep_in_c": 1 for thread in threads})
    healthy_afterwards(hasty)
    eventually(lambda: len(worker.children()) == 4, what="four children")
    assert worker.process.poll() is None
    assert worker.events("node_timeouts_end_the_worker") == []
    assert {event["reason"] for event in worker.events("child_lost")} == {"signal 9 (SIGKILL)"}
    assert hasty.notes("charged") == []


def test_a_node_that_will_not_hear_is_refused_what_it_still_wants_to_do(hasty):
    worker = hasty.worker(concurrency=2)
    hasty.start("deaf", "d")
    overstayed(hasty, ["d"], status="ready")

    assert hasty.query("SELECT failures, starts FROM keepstep_thread") == [(1, 1)]
    assert len(hasty.notes("told")) == 1
    healthy_afterwards(hasty)
    assert hasty.notes("charged") == []
    assert hasty.query("SELECT count(*) FROM keepstep_effect") == [(0,)]
    assert worker.events("child_lost") == []


@pytest.mark.kill
@pytest.mark.slow
@pytest.mark.parametrize(("pool", "graph", "slots", "number"), [("threads", "deaf", 4, 8), ("solo", "stuck", 1, 2)])
def test_a_pool_that_cannot_interrupt_ends_its_worker_and_says_so_at_the_start(hasty, pool, graph, slots, number):
    worker = hasty.supervised(concurrency=slots, pool=pool)
    [told] = worker.events("node_timeouts_end_the_worker")
    assert (told["level"], told["pool"]) == ("warning", pool)
    assert "keepstep worker" in told["reason"]
    threads = [f"s{each}" for each in range(number)]
    hasty.start(graph, *threads)

    overstayed(hasty, threads, status="ready" if graph == "deaf" else "failed")
    healthy_afterwards(hasty)
    assert hasty.notes("charged") == []
    assert {event["reason"] for event in worker.events("worker_died")} == {"signal 9"}
    # All that overstay together are written off together.
    assert len(worker.events("worker_died")) <= number
    assert worker.process.poll() is None
    assert worker.stop() == 0
