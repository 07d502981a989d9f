"""Processes are killed between a parent and its child: it is started once, told once, cancelled with its parent."""

from __future__ import annotations

import signal

import pytest

from tests.crash import evidence
from tests.crash.matrix import OF_CANCELS, OF_FAMILIES
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill


def family(crew, thread):
    """Return (name, state, status) of the children of a thread and of theirs, and what is left to do for them."""
    return crew.deployment.query(
        "SELECT name, state, status, due_at FROM keepstep_child WHERE name LIKE :name ORDER BY name", name=f"{thread}.%"
    )


@pytest.mark.parametrize("death", OF_FAMILIES, ids=lambda death: death.id)
def test_a_pool_child_dies_between_a_parent_and_its_child(crew, death):
    [worker], thread = crew.workers(1), f"fleet-{death.point}"
    deployment = crew.deployment
    crew.arm(death.point, death.at)

    deployment.client.start("fleet", thread, {"seats": 1, "seat": 0})
    deployment.ended(thread)
    point, pid = crew.died()
    assert point == death.point

    boat = f"{thread}.boat"
    assert family(crew, thread) == [(boat, "delivered", "done", None)]
    assert evidence.history(deployment, thread) == [("input", {}), ("step", {"launch": death.starts.get("launch", 2)})]
    assert evidence.history(deployment, boat) == [("input", {}), ("step", {"row": 1})]
    for name in (thread, boat):
        assert evidence.state(deployment, name)["log"] == [f"oars of {boat}"]
        assert evidence.count(deployment, "run", name, "x.status = 'done' AND x.steps = 1") == 1
        assert evidence.count(deployment, "run", name) == 1
    assert evidence.count(deployment, "wait", thread, "x.kind = 'child' AND x.status = 'closed'") == 1
    assert crew.outside.calls(thread) == {"enter-launch": death.entered.get("launch", 2)}
    assert crew.outside.calls(boat) == {"enter-row": 1, "oars": 1}
    assert evidence.commands(deployment, boat) == {"start": 1}
    eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")


@pytest.mark.parametrize("death", OF_CANCELS, ids=lambda death: death.id)
def test_a_main_process_dies_while_a_family_is_cancelled(crew, death):
    workers, thread = crew.workers(2), f"fleet-{death.point}"
    deployment = crew.deployment
    family_of = [thread, f"{thread}.boat", f"{thread}.boat.boat"]
    deployment.client.start("fleet", thread, {"seats": 2, "seat": 1})
    deployment.ended(*family_of, status="waiting")
    crew.arm(death.point, death.at)

    deployment.client.cancel(thread, graph="fleet")
    point, pid = crew.died()
    assert point == death.point

    deployment.ended(*family_of, status="cancelled")
    rows = eventually(lambda: [row for row in [family(crew, thread)] if row[1][1] == "delivered"], what="the end")[0]
    assert rows == [(name, "delivered", "cancelled", None) for name in family_of[1:]]
    for name in family_of:
        assert evidence.commands(deployment, name)["cancel"] == 1
        assert evidence.count(deployment, "wait", name, "x.status = 'open'") == 0
        assert "oars" not in crew.outside.calls(name)
    [victim] = [worker for worker in workers if worker.pid == pid]
    assert victim.process.wait(10) == -signal.SIGKILL
