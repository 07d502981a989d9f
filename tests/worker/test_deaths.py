"""Processes die by SIGKILL in the middle of a node, and the work goes on elsewhere."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import psutil
import pytest

import keepstep
from tests.worker.deployment import deployed, eventually

pytestmark = pytest.mark.kill

PATIENT = {"liveness_window_seconds": 60.0, "renew_seconds": 5.0}
"""Nothing is taken over in this time: what goes on does so because a worker noticed its child's death."""


@pytest.fixture
def patient(tmp_path, urls):
    with deployed(tmp_path, *urls, **PATIENT) as deployment:
        yield deployment


def test_a_killed_childs_node_runs_again_at_once(patient):
    worker = patient.worker(concurrency=2)
    patient.start("held", "h")
    victim = int(patient.holding("h")[0][-2])

    os.kill(victim, signal.SIGKILL)
    second = patient.holding("h", times=2)[1]
    patient.touch("release")
    patient.ended("h")

    assert int(second[-2]) != victim
    assert patient.counts("starts") == Counter({"h before": 1, "h hold": 2, "h after": 1})
    assert patient.counts("paid") == Counter({"h before": 1, "h hold": 1, "h after": 1})
    lost = worker.events("child_lost")
    assert [(event["pid"], event["reason"], event["released"]) for event in lost] == [(victim, "signal 9 (SIGKILL)", 1)]


def test_killing_idle_children_stops_nothing(patient):
    worker = patient.worker(concurrency=2)
    for number in range(4):
        patient.start("chain", f"t{number}")
        patient.ended(f"t{number}")
        for pid in worker.children():
            os.kill(pid, signal.SIGKILL)

    assert patient.counts("starts") == Counter({f"t{number} {node}": 1 for number in range(4) for node in "abc"})


def test_another_worker_takes_over_from_one_that_was_killed(deployment):
    workers = [deployment.worker(concurrency=1) for _ in range(2)]
    deployment.start("held", "h")
    parent = psutil.Process(int(deployment.holding("h")[0][-2])).ppid()
    victim, survivor = sorted(workers, key=lambda worker: worker.pid != parent)

    victim.kill()
    second = deployment.holding("h", times=2)[1]
    deployment.touch("release")
    deployment.ended("h")

    assert int(second[-2]) in survivor.children()
    assert deployment.counts("starts") == Counter({"h before": 1, "h hold": 2, "h after": 1})
    assert deployment.counts("paid") == Counter({"h before": 1, "h hold": 1, "h after": 1})


def test_the_supervisor_puts_a_worker_back(embedded):
    worker = embedded.supervised(concurrency=1)
    embedded.start("held", "h")
    embedded.holding("h")

    os.kill(worker.main_pid, signal.SIGKILL)
    embedded.holding("h", times=2)
    embedded.touch("release")
    embedded.ended("h")

    assert [event["reason"] for event in worker.events("worker_died")] == ["signal 9"]
    assert embedded.counts("starts") == Counter({"h before": 1, "h hold": 2, "h after": 1})
    assert worker.stop() == 0


def test_a_killed_supervisor_leaves_no_worker_behind(embedded):
    worker = embedded.supervised(concurrency=1)
    main = psutil.Process(worker.main_pid)
    eventually(main.children, what="the pool")
    family = [main, *main.children()]

    os.kill(worker.pid, signal.SIGKILL)

    gone, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert len(gone) == 2


def test_a_node_that_kills_its_process_is_blocked_after_three_deaths(deployment):
    worker = deployment.worker(concurrency=2)
    healthy = [f"t{number}" for number in range(10)]
    deployment.start("poison", "p")
    deployment.start("chain", *healthy)

    deployment.ended("p", status="blocked")
    deployment.ended(*healthy)

    assert deployment.counts("starts")["p die"] == 3
    assert {deployment.counts("starts")[f"{thread} {node}"] for thread in healthy for node in "abc"} == {1}
    [(error, deaths, nonce)] = deployment.query(
        "SELECT error, deaths, lease_nonce FROM keepstep_thread WHERE name = 'p'"
    )
    error = json.loads(error)
    assert (deaths, nonce) == (3, None)
    assert error["code"] == "worker_lost"
    assert "signal 9" in error["message"]
    assert "die" in error["message"]
    assert [event["reason"] for event in worker.events("child_lost")] == ["signal 9 (SIGKILL)"] * 3
    # Nobody is sent to it any more.
    admitted = len(worker.events("admitted"))
    deployment.start("chain", "last")
    deployment.ended("last")
    assert deployment.counts("starts")["p die"] == 3
    assert len(worker.events("admitted")) <= admitted + 1
    assert worker.process.poll() is None

    deployment.touch("cured")
    deployment.client.retry("p", graph="poison")
    deployment.ended("p")
    assert deployment.counts("starts")["p die"] == 4
    assert len(worker.events("child_lost")) == 3


def test_a_node_that_outlives_the_window_and_many_sweeps_starts_once(deployment):
    worker = deployment.worker(concurrency=2)
    deployment.start("held", "h")
    deployment.started("h hold")

    seen: set[float] = set()

    def renewed_often() -> bool:
        [(alive_until,)] = deployment.query("SELECT alive_until FROM keepstep_worker")
        seen.add(alive_until)
        return len(seen) >= 20  # 6 s: three liveness windows, twenty sweeps

    eventually(renewed_often, what="twenty renewals")
    deployment.touch("release")
    deployment.ended("h")

    assert deployment.counts("starts") == Counter({"h before": 1, "h hold": 1, "h after": 1})
    assert worker.events("swept") == []


def test_a_worker_that_was_given_up_goes_on_under_its_own_id(served):
    # Not on SQLite: a process that is stopped in the middle of a write keeps everybody from writing.
    worker = served.worker(concurrency=1)
    [(worker_id,)] = served.query("SELECT id FROM keepstep_worker")
    os.kill(worker.pid, signal.SIGSTOP)
    other = served.worker(concurrency=1)
    eventually(lambda: (worker_id,) not in served.query("SELECT id FROM keepstep_worker"), what="giving the worker up")
    other.stop()

    os.kill(worker.pid, signal.SIGCONT)
    eventually(lambda: served.query("SELECT id FROM keepstep_worker") == [(worker_id,)], what="the worker's return")
    served.start("chain", "t")
    served.ended("t")

    assert [event["worker_id"] for event in worker.events("worker_was_given_up")] == [worker_id]
    assert served.counts("starts") == Counter({"t a": 1, "t b": 1, "t c": 1})


STARTS = {"after_claim": 1, "before_commit": 1, "inside_commit": 2, "after_commit": 1, "after_nudge": 1}
"""How often the first node runs; the first commit is that of the run's input, before any node."""


@pytest.mark.parametrize("point", STARTS)
def test_a_worker_killed_at_a_boundary_repeats_no_committed_step(deployment, point, tmp_path):
    mark = tmp_path / "crashed"
    # One process does everything, so that a kill leaves nobody behind who could notice it.
    where = f"{point}@{'step' if point == 'inside_commit' else ''}"
    first = deployment.launch(pool="solo", KEEPSTEP_CRASH_AT=where, KEEPSTEP_CRASH_MARK=str(mark))
    with keepstep.Client(settings=deployment.settings) as client:
        client.start("chain", "t", {})
    assert first.process.wait(60) == -signal.SIGKILL
    assert mark.exists()

    deployment.worker(concurrency=1)
    deployment.ended("t")

    assert deployment.counts("starts") == Counter({"t a": STARTS[point], "t b": 1, "t c": 1})
    assert deployment.counts("paid") == Counter({"t a": 1, "t b": 1, "t c": 1})


@pytest.mark.parametrize("deployment", ["embedded", "served_by_rabbitmq"], indirect=True)
def test_a_command_whose_worker_died_before_it_was_committed_comes_again(deployment, tmp_path):
    """Sent once, by somebody who waits for no answer: the broker alone brings it back.

    Redis does so after half a minute (tests/broker/test_client_broker.py); the others as soon as its consumer is gone.
    """
    first = deployment.launch(
        pool="solo", KEEPSTEP_CRASH_AT="inside_command", KEEPSTEP_CRASH_MARK=str(tmp_path / "crashed")
    )
    with keepstep.Client(settings=deployment.settings) as client:
        client.start("chain", "t", {})
    assert first.process.wait(60) == -signal.SIGKILL
    assert deployment.statuses() == {}
    deployment.worker(concurrency=1)
    deployment.ended("t", seconds=30)
    assert deployment.counts("starts") == Counter({"t a": 1, "t b": 1, "t c": 1})


def test_a_command_committed_by_a_worker_that_died_is_not_lost(deployment, tmp_path):
    first = deployment.launch(
        pool="solo", KEEPSTEP_CRASH_AT="after_command", KEEPSTEP_CRASH_MARK=str(tmp_path / "crashed")
    )
    with keepstep.Client(settings=deployment.settings) as client:
        receipt = client.start("chain", "t", {})
        assert first.process.wait(60) == -signal.SIGKILL
        deployment.worker(concurrency=1)
        deployment.ended("t")
        if not deployment.settings.broker.startswith("redis://"):
            # Its message comes back as soon as its consumer is dead, and is found to have been accepted.
            assert receipt.accepted(timeout=20).duplicate is True

    assert deployment.counts("starts") == Counter({"t a": 1, "t b": 1, "t c": 1})
