"""Processes that stand still and wake up when others have taken their work: they act on nothing and write nothing."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil
import pytest
import sqlalchemy

from tests.crash import evidence
from tests.crash.conftest import on_each_broker
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill


def everything(deployment):
    """Return every row that a step can write."""
    with deployment._engine.connect() as connection:
        found = {
            table: [
                # An event is given its position later, by whoever publishes.
                [bytes(v) if isinstance(v, memoryview) else v for name, v in row.items() if name != "position"]
                for row in connection.execute(sqlalchemy.text(f"SELECT * FROM keepstep_{table}")).mappings()
            ]
            for table in ("thread", "run", "checkpoint", "node_run", "effect", "wait", "approval", "event")
        }
    return {table: sorted(rows, key=repr) for table, rows in found.items()}


def family(worker):
    main = psutil.Process(worker.pid)
    return [worker.pid, *(child.pid for child in main.children(recursive=True))]


@contextlib.contextmanager
def standing_still(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def worker_id(deployment, worker):
    [(found,)] = deployment.query("SELECT id FROM keepstep_worker WHERE pid = :pid", pid=worker.pid)
    return found


def owners(deployment, thread):
    """Return who committed each checkpoint."""
    with evidence.opened(deployment) as store, contextlib.closing(evidence.Reader(store=store)) as reader:
        return [checkpoint.meta["worker"] for checkpoint in reader.history(thread)]


def lost_lease(worker, thread):
    eventually(
        lambda: [event for event in worker.events("lease_lost") if event["thread"] == thread],
        seconds=60,
        what="the zombie's discovery",
    )


@on_each_broker
def test_a_worker_that_stood_still_past_its_window_writes_nothing(served, outside):
    thread = "stopped-worker"
    first = served.worker(concurrency=1)
    outside.hold("walk", thread)
    served.start("errand", thread)
    outside.called("walk", thread)
    second = served.worker(concurrency=1)
    owner = worker_id(served, second)

    with standing_still(*family(first)):
        outside.called("walk", thread, 2)
        outside.let_go("walk", thread)
        served.ended(thread, seconds=60)
        before = everything(served)
    lost_lease(first, thread)

    assert everything(served) == before
    assert outside.calls(thread) == {"enter-go": 2, "shop": 1, "walk": 2, "goods": 1, "enter-home": 1}
    assert [runs for _, runs in evidence.history(served, thread)] == [{}, {"go": 2}, {"home": 1}]
    assert owners(served, thread)[1:] == [owner, owner]
    # It is no worse a worker for it.
    second.stop()
    served.start("errand", "afterwards")
    served.ended("afterwards", seconds=60)
    assert outside.calls("afterwards") == {"enter-go": 1, "shop": 1, "walk": 1, "goods": 1, "enter-home": 1}


@pytest.mark.parametrize(
    ("graph", "thread", "seats", "body"),
    [
        pytest.param("crowd", "at-its-commit", -2, "enter-invite", id="commit"),
        pytest.param("crowd", "held-at-its-pending-write", 2, "enter-guest1", id="pending-write"),
        pytest.param("doubtful", "at-its-park", 0, "enter-doubt", id="park"),
    ],
)
def test_a_worker_that_stood_still_at_the_end_of_a_node_writes_nothing(served, outside, graph, thread, seats, body):
    first = served.worker(concurrency=1)
    outside.hold("walk", thread)
    served.start(graph, thread, seats=seats)
    outside.called("walk", thread)
    served.worker(concurrency=1)
    if graph == "crowd":
        # It wakes while the other is in the node, and has finished first.
        with standing_still(*family(first)):
            outside.called("walk", thread, 2)
            before = everything(served)
            outside.let_first_go("walk", thread)
    else:
        with standing_still(*family(first)):
            served.ended(thread, status="waiting", seconds=60)
            before = everything(served)
            outside.let_go("walk", thread)
    lost_lease(first, thread)
    assert everything(served) == before
    outside.let_go("walk", thread)
    served.ended(thread, status="waiting" if graph == "doubtful" else "done", seconds=60)

    calls = outside.calls(thread)
    assert (calls.pop(body), calls.pop("walk")) == (2, 1 if graph == "doubtful" else 2)
    assert set(calls.values()) <= {1}
    assert evidence.count(served, "approval", thread) == (graph == "doubtful")
    assert len(evidence.history(served, thread)) == (1 if graph == "doubtful" else 4)


def test_a_pool_child_that_stood_still_past_its_nodes_deadline_writes_nothing(
    deploy, postgresql_url, redis_url, outside
):
    thread = "stopped-child"
    deployment = deploy(postgresql_url, redis_url, timeout_grace_seconds=0.3)
    worker = deployment.worker(concurrency=2)
    outside.hold("walk", thread)
    deployment.start("hasty", thread)
    outside.called("walk", thread)
    [(child,)] = deployment.query("SELECT lease_child FROM keepstep_thread WHERE name = :name", name=thread)

    with standing_still(child):
        deployment.ended(thread, seconds=60)
        before = everything(deployment)
        outside.let_go("walk", thread)
    # Its alarm and its watchdog are both overdue: it stops by itself, or is ended.
    eventually(lambda: worker.events("lease_lost") + worker.events("child_lost"), seconds=60, what="the zombie's end")

    assert everything(deployment) == before
    assert outside.calls(thread) == {"enter-dash": 2, "shop": 1, "walk": 1, "goods": 1}
    assert [runs for _, runs in evidence.history(deployment, thread)] == [{}, {"dash": 2}]
    assert len(outside.keys(thread, "goods")) == 1


@on_each_broker
def test_the_process_that_sweeps_stands_still_and_takes_over_nobody_when_it_wakes(served, outside, broker_server):
    sweeping, other = served.worker(concurrency=1), served.worker(concurrency=1)
    ids = {worker.pid: worker_id(served, worker) for worker in (sweeping, other)}
    with standing_still(*family(sweeping)):
        gone = "SELECT count(*) FROM keepstep_worker WHERE id = :id"
        eventually(lambda: served.query(gone, id=ids[sweeping.pid]) == [(0,)], seconds=60, what="giving it up")
        # Others find what is due: here a thread whose only message is lost.
        outside.hold("walk", "held-by-other")
        served.start("errand", "held-by-other")
        outside.called("walk", "held-by-other")
        served.start("errand", "found")
        broker_server.flush()
        lease = served.query(
            "SELECT lease_nonce, lease_worker, deaths FROM keepstep_thread WHERE name = 'held-by-other'"
        )
        assert lease[0][1:] == (ids[other.pid], 0)

    eventually(lambda: sweeping.events("worker_was_given_up"), seconds=60, what="its return")
    # Awake again it works, and sweeps: what nobody has done is done by it.
    evidence.hasten(served)
    served.ended("found", seconds=60)
    # It may judge when it has itself been seen for a window; until then and from then on the other one lives.
    lived = "SELECT alive_until FROM keepstep_worker WHERE id = :id"
    seen = set()
    eventually(
        lambda: seen.update(served.query(lived, id=ids[other.pid])) or len(seen) > 10, seconds=60, what="a window"
    )
    assert (
        served.query("SELECT lease_nonce, lease_worker, deaths FROM keepstep_thread WHERE name = 'held-by-other'")
        == lease
    )
    assert other.events("worker_was_given_up") == []
    assert {row[0] for row in served.query("SELECT id FROM keepstep_worker")} == set(ids.values())
    outside.let_go("walk", "held-by-other")
    served.ended("held-by-other", seconds=60)
    for thread in ("held-by-other", "found"):
        assert outside.calls(thread) == {"enter-go": 1, "shop": 1, "walk": 1, "goods": 1, "enter-home": 1}


@on_each_broker
def test_a_payment_that_was_under_way_is_not_made_again_and_its_late_result_counts(served, outside):
    thread = "stopped-payment"
    first = served.worker(concurrency=1)
    outside.hold("transfer", thread)
    served.start("slow_bank", thread)
    outside.called("transfer", thread)
    served.worker(concurrency=1)

    with standing_still(*family(first)):
        served.ended(thread, status="blocked", seconds=60)
        assert evidence.error_code(served, thread) == "effect_unknown"
        assert evidence.journal(served, thread) == {"pay:transfer": ("intent", 1)}
        outside.let_go("transfer", thread)
    eventually(
        lambda: evidence.journal(served, thread) == {"pay:transfer": ("done", 1)}, seconds=60, what="the late result"
    )
    lost_lease(first, thread)
    assert served.statuses() == {thread: "blocked"}

    served.client.retry(thread, graph="slow_bank")
    served.ended(thread, seconds=60)

    assert outside.calls(thread) == {"enter-transfer": 3, "transfer": 1}
    assert evidence.state(served, thread) == {"log": [f"transfer of {thread}"]}
    assert [kind for kind, _ in evidence.history(served, thread)] == ["input", "step"]


def test_a_worker_cut_off_from_the_database_pays_nothing(
    deploy, postgresql_url, proxied_url, postgresql_proxy, redis_url, outside
):
    thread = "cut-off"
    deployment = deploy(postgresql_url, redis_url)
    cut_off = deployment.worker(concurrency=1, KEEPSTEP_DATABASE=proxied_url)
    outside.hold("walk", thread)
    deployment.start("errand", thread)
    outside.called("walk", thread)
    deployment.worker(concurrency=1)

    postgresql_proxy.refuse()
    outside.called("walk", thread, 2)
    outside.let_go("walk", thread)
    deployment.ended(thread, seconds=60)
    eventually(lambda: cut_off.events("database_unavailable"), seconds=60, what="the attempt to begin a payment")
    assert outside.calls(thread)["goods"] == 1
    before = everything(deployment)
    postgresql_proxy.accept()
    lost_lease(cut_off, thread)

    assert everything(deployment) == before
    assert outside.calls(thread) == {"enter-go": 2, "shop": 1, "walk": 2, "goods": 1, "enter-home": 1}
    assert [runs for _, runs in evidence.history(deployment, thread)] == [{}, {"go": 2}, {"home": 1}]
