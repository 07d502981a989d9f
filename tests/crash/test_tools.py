"""Processes are killed around each function of a two-phase tool: a server outside has counted each of them once."""

from __future__ import annotations

import pytest

from tests.crash import evidence
from tests.crash.matrix import OF_APPROVED_CALLS, OF_REJECTED_CALLS
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

CALLS = {True: ("reserve", "load", "seal"), False: ("reserve", "release")}
OUTSIDE = {"cargo.prepare": "reserve", "cargo": "load", "cargo.commit": "seal", "cargo.cancel": "release"}


def approval(crew, thread):
    def look():
        return crew.deployment.query(
            "SELECT w.approval_id FROM keepstep_wait w JOIN keepstep_thread t ON t.id = w.thread_id "
            "WHERE t.name = :name AND w.status = 'open'",
            name=thread,
        )

    return eventually(look, what="the question")[0][0]


def decide(crew, thread, *, approved):
    client = crew.deployment.client
    found = approval(crew, thread)
    client.approve(found, by="anna") if approved else client.reject(found, by="anna")


def resolve(crew, thread, death):
    """Say what became of the call that was cut off, as somebody would who looked outside."""
    rows = eventually(
        lambda: crew.deployment.query(
            "SELECT e.step || '/' || e.run || '/' || e.call, e.name FROM keepstep_effect e "
            "JOIN keepstep_thread t ON t.id = e.thread_id "
            "WHERE t.name = :name AND t.status = 'blocked' AND e.state = 'intent'",
            name=thread,
        ),
        what="the block",
    )
    [(key, name)] = rows
    assert evidence.error_code(crew.deployment, thread) == "effect_unknown"
    happened = OUTSIDE[name] in crew.outside.calls(thread)
    assert happened == (death.point == "after_call")
    result = f"load of {thread}" if name == "cargo" and happened else None
    crew.deployment.client.resolve(key, "happened" if happened else "not_happened", result=result, by="anna")


@pytest.mark.parametrize("death", [*OF_APPROVED_CALLS, *OF_REJECTED_CALLS], ids=lambda death: death.id)
def test_a_pool_child_dies_under_a_two_phase_tool(crew, death):
    approved = death in OF_APPROVED_CALLS
    [worker], thread = crew.workers(1), f"freighter.{death.point}.{death.at.replace(':', '.')}"
    deployment = crew.deployment
    crew.arm(death.point, death.at)
    is_preparing = death.at == "cargo.prepare:cargo"

    deployment.client.start("freighter", thread, {})
    if is_preparing and death.blocked:
        resolve(crew, thread, death)
    decide(crew, thread, approved=approved)
    if not is_preparing and death.blocked:
        resolve(crew, thread, death)
    deployment.ended(thread)
    point, pid = crew.died()
    assert point == death.point

    calls = crew.outside.calls(thread)
    calls.pop("enter-load")
    assert calls == dict.fromkeys(CALLS[approved], 1)
    for name in calls:
        assert len(crew.outside.keys(thread, name)) == 1
    assert evidence.state(deployment, thread)["log"] == [f"load of {thread}" if approved else "reject"]
    action = "call" if approved else "call_rejected"
    said = deployment.query(
        "SELECT a.action FROM keepstep_audit a JOIN keepstep_thread t ON t.id = a.thread_id "
        "WHERE t.name = :name AND a.action LIKE 'call%'",
        name=thread,
    )
    assert said == [(action,)]
    assert evidence.count(deployment, "approval", thread) == 1
    eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")
