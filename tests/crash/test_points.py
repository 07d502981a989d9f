"""Processes are killed at every named point of the protocol; the histories and the outside world say what it cost."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from keepstep.crashpoints import POINTS
from tests.crash import evidence
from tests.crash.matrix import (
    ADMITTED,
    CALLS,
    DEATHS,
    ENTERED,
    HISTORY,
    OF_CHILDREN,
    OF_MAIN_PROCESS,
    OF_PUBLISHERS,
    REGISTERED,
)
from tests.crash.page import page
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

LOG = [
    *("price of {0}", "fare of {0}", "seat0 of {0}", "seat1 of {0}", "seat2 of {0}"),
    *("rules of {0}", "approve", "cabin of {0}", "high", "slept", "toll of {0}"),
]
EVENTS = {
    **dict.fromkeys(("thread.started", "thread.paused", "thread.resumed", "thread.done", "node.emitted"), 1),
    "approval.opened": 1,
    "approval.closed": 1,
    "thread.waiting": 3,
}
_UNPUBLISHED = (
    "SELECT count(*) FROM keepstep_event "
    "WHERE coalesce(position, 1e12) > (SELECT position FROM keepstep_mark WHERE name = 'published')"
)
COMMANDS = {"start": 1, "pause": 1, "edit": 1, "resume": 1, "decide": 1, "signal": 1}


def begin(crew, thread):
    crew.deployment.client.start("voyage", thread, {})


def sail(crew, thread):
    """Give a voyage everything that it waits for, as it comes to it."""
    client = crew.deployment.client
    begin(crew, thread)
    approval = open_wait(crew, thread, "approval")
    client.pause(thread, graph="voyage")
    client.edit(thread, {"seats": 5}, by="anna", graph="voyage")
    client.resume(thread, graph="voyage")
    client.approve(approval, by="anna")
    open_wait(crew, thread, "signal")
    client.signal(thread, "tide", "high", graph="voyage")
    crew.deployment.ended(thread)


def open_wait(crew, thread, kind):
    def look():
        return crew.deployment.query(
            "SELECT coalesce(w.approval_id, w.signal_name) FROM keepstep_wait w JOIN keepstep_thread t "
            "ON t.id = w.thread_id WHERE t.name = :name AND w.kind = :kind AND w.status = 'open'",
            name=thread,
            kind=kind,
        )

    return eventually(look, what=f"a wait for a {kind}")[0][0]


def check_voyage(crew, thread, death):
    """Everything is as without the death, but for what the matrix says."""
    deployment = crew.deployment
    starts = [(kind, {run: death.starts.get(run, times) for run, times in runs.items()}) for kind, runs in HISTORY]
    assert evidence.history(deployment, thread) == starts
    assert evidence.state(deployment, thread) == {"log": [line.format(thread) for line in LOG], "seats": 5}
    check_outside(crew, thread, {**ENTERED, **death.entered}, {**CALLS, **death.calls})
    assert {call.split(":")[1]: done for call, done in evidence.journal(deployment, thread).items()} == dict.fromkeys(
        CALLS, ("done", 1)
    )
    assert evidence.commands(deployment, thread) == COMMANDS
    assert deployment.query(
        "SELECT status, control, lease_nonce, pending, runs, queued FROM keepstep_thread WHERE name = :name",
        name=thread,
    ) == [("done", "", None, 0, 1, 0)]
    assert evidence.count(deployment, "run", thread, "x.status = 'done' AND x.steps = 7") == 1
    # There the pause is taken away behind everybody's back.
    untold = {"thread.resumed"} if death is ADMITTED else set()
    assert evidence.events(deployment, thread) == {kind: n for kind, n in EVENTS.items() if kind not in untold}
    assert evidence.count(deployment, "node_run", thread) == 3
    assert evidence.count(deployment, "approval", thread) == 1
    assert evidence.count(deployment, "wait", thread) == 3
    assert evidence.count(deployment, "wait", thread, "x.status = 'open'") == 0
    assert evidence.count(deployment, "signal", thread) == 0


def check_outside(crew, thread, entered, calls):
    expected = {f"enter-{node}": times for node, times in entered.items()} | calls
    assert crew.outside.calls(thread) == {name: times for name, times in expected.items() if times}
    for name, times in calls.items():
        assert len(crew.outside.keys(thread, name)) == min(times, 1), f"{name} was asked for under several keys"


def check_blocked(crew, thread, death):
    """The thread is where it was, says why, and an operator's retry calls nothing either."""
    deployment = crew.deployment
    for attempt in (0, 1):
        if attempt:
            deployment.client.retry(thread, graph="voyage")
            crew.outside.called("enter-fare", thread, death.entered["fare"] + attempt)
        eventually(lambda: blocked_runs(crew, thread) == death.entered["fare"] + attempt, what="the block")  # noqa: B023
        assert evidence.error_code(deployment, thread) == "effect_unknown"
        assert evidence.history(deployment, thread) == list(HISTORY[:2])
        assert evidence.journal(deployment, thread)["pay:fare"] == ("intent", 1)
        entered = {"price": 1, "fare": death.entered["fare"] + attempt}
        check_outside(crew, thread, entered, {"price": 1, "fare": 1, **death.calls})


def blocked_runs(crew, thread):
    """Return the starts of the blocked step; None while it is not blocked."""
    rows = crew.deployment.query(
        "SELECT starts FROM keepstep_thread WHERE name = :name AND status = 'blocked'", name=thread
    )
    return rows[0][0] if rows else None


@pytest.mark.parametrize("death", OF_CHILDREN, ids=lambda death: death.id)
def test_a_pool_child_dies(crew, death):
    child_dies(crew, death, "")


@pytest.mark.parametrize("death", [d for d in OF_CHILDREN if d.of_the_broker], ids=lambda death: death.id)
def test_a_pool_child_dies_on_rabbitmq(rabbitmq_crew, death):
    child_dies(rabbitmq_crew, death, "rabbitmq.")


def child_dies(crew, death, prefix):
    [worker], thread = crew.workers(1), prefix + death.id.replace("#", ".").replace("/", ".")
    crew.arm(death.point, death.at)

    begin(crew, thread) if death.blocked else sail(crew, thread)
    point, pid = crew.died()
    assert point == death.point

    (check_blocked if death.blocked else check_voyage)(crew, thread, death)
    lost = eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")
    assert [event["reason"] for event in lost] == ["signal 9 (SIGKILL)"]
    assert worker.process.poll() is None
    assert worker.events("nudge_dropped") == []


@pytest.mark.parametrize("death", OF_MAIN_PROCESS, ids=lambda death: death.id)
def test_a_main_process_dies(crew, death):
    main_process_dies(crew, death, "")


@pytest.mark.parametrize("death", [d for d in OF_MAIN_PROCESS if d.of_the_broker], ids=lambda death: death.id)
def test_a_main_process_dies_on_rabbitmq(rabbitmq_crew, death):
    main_process_dies(rabbitmq_crew, death, "rabbitmq.")


def main_process_dies(crew, death, prefix):
    workers, thread = crew.workers(2), prefix + death.id
    pools = {worker.pid: psutil.Process(worker.pid).children() for worker in workers}
    crew.arm(death.point, death.at)

    sail(crew, thread)
    point, pid = crew.died()
    assert point == death.point

    check_voyage(crew, thread, death)
    [victim] = [worker for worker in workers if worker.pid == pid]
    assert victim.process.wait(10) == -signal.SIGKILL
    # A pool does not outlive its worker.
    assert psutil.wait_procs(pools[pid], timeout=20)[1] == []


@pytest.mark.parametrize("death", OF_PUBLISHERS, ids=lambda death: death.id)
def test_who_publishes_events_dies(crew, death):
    who_publishes_dies(crew, death, "")


@pytest.mark.parametrize("death", OF_PUBLISHERS, ids=lambda death: death.id)
def test_who_publishes_events_dies_on_rabbitmq(rabbitmq_crew, death):
    who_publishes_dies(rabbitmq_crew, death, "rabbitmq.")


def who_publishes_dies(crew, death, prefix):
    workers, thread = crew.workers(2), prefix + death.id
    subscription = crew.deployment.client.events(thread, timeout=60)
    eventually(lambda: crew.deployment.query(_UNPUBLISHED) == [(0,)], what="earlier events published")
    crew.arm(death.point)

    sail(crew, thread)
    point, pid = crew.died()
    assert point == death.point
    check_voyage(crew, thread, death)
    assert [worker.process.wait(10) for worker in workers if worker.pid == pid] == [-signal.SIGKILL]

    heard = []
    for event in subscription:
        if event["thread"] == thread:
            heard.append((event["position"], event["event"]))
        if (event["thread"], event["event"]) == (thread, "thread.done"):
            break
    subscription.remove()
    # Some may come twice, for those that were not marked; none is missing, and what comes twice says so.
    once = dict(heard)
    assert Counter(once.values()) == EVENTS
    assert list(once) == sorted(once)
    assert len(heard) > len(once) if death.point == "after_announce" else heard == list(once.items())


def test_a_worker_dies_when_it_has_registered(crew):
    [worker], thread = crew.workers(1), "after_register"
    crew.arm("after_register")

    other = crew.deployment.launch(concurrency=1)
    assert other.process.wait(30) == -signal.SIGKILL
    assert crew.died() == ("after_register", other.pid)
    sail(crew, thread)

    check_voyage(crew, thread, REGISTERED)
    eventually(
        lambda: crew.deployment.query("SELECT pid FROM keepstep_worker") == [(worker.pid,)],
        what="the dead worker's row removed",
    )


def test_a_worker_dies_when_it_has_let_in_what_is_due(crew):
    workers, thread = crew.workers(2), "after_admission"
    client = crew.deployment.client
    begin(crew, thread)
    approval = open_wait(crew, thread, "approval")
    client.pause(thread, graph="voyage")
    client.edit(thread, {"seats": 5}, by="anna", graph="voyage")
    client.approve(approval, by="anna")
    crew.arm("after_admission")
    # Due, and its nudge was lost: nobody but admission knows of it.
    crew.deployment.execute(
        "UPDATE keepstep_thread SET control = '', next_nudge_at = due_at WHERE name = :name", name=thread
    )

    point, pid = crew.died()
    assert point == "after_admission"
    open_wait(crew, thread, "signal")
    client.signal(thread, "tide", "high", graph="voyage")
    client.resume(thread, graph="voyage")
    crew.deployment.ended(thread)
    check_voyage(crew, thread, ADMITTED)
    assert [worker.process.wait(10) for worker in workers if worker.pid == pid] == [-signal.SIGKILL]


def test_every_point_is_tested():
    assert {death.point for death in DEATHS} == set(POINTS)
    assert len({death.id for death in DEATHS}) == len(DEATHS)


def test_the_page_of_crash_points_is_current():
    assert (Path(__file__).parents[2] / "docs" / "crash-points.md").read_text(encoding="utf-8") == page()
