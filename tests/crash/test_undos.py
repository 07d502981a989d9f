"""Processes are killed while they undo what a failed run did: each is undone once, the newest first."""

from __future__ import annotations

import pytest

from tests.crash import evidence
from tests.crash.matrix import OF_UNDOS
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill

CHARGED = ["flight", "hotel", "car"]
REFUNDED = ["refund-car", "refund-hotel", "refund-flight"]


def names(crew, thread):
    """Return what a thread has asked of the outside world, in the order of the first time, and how often."""
    calls = crew.outside.calls(thread)
    return [(name, times) for name, times in calls.items() if not name.startswith("enter-")]


@pytest.mark.parametrize("death", OF_UNDOS, ids=lambda death: death.id)
def test_a_pool_child_dies_while_it_undoes(crew, death):
    [worker], thread = crew.workers(1), f"holiday-{death.id.replace('/', '.').replace(':', '.')}"
    deployment = crew.deployment
    crew.arm(death.point, death.at)

    deployment.client.start("holiday", thread, {})
    if death.blocked:
        deployment.ended(thread, status="blocked")
        resolve(crew, thread, death)
    deployment.ended(thread, status="failed")
    point, pid = crew.died()
    assert point == death.point

    assert names(crew, thread) == [(name, 1) for name in [*CHARGED, *REFUNDED]]
    for name in REFUNDED:
        assert len(crew.outside.keys(thread, name)) == 1
    journal = evidence.journal(deployment, thread)
    again = ("done", 2) if death.calls else ("done", 1)
    assert journal == {
        **{f"charge:{name}": ("done", 1) for name in CHARGED},
        **{f"charge:{name}/undo": ("done", 1) for name in CHARGED},
        **({"charge:car/undo": again} if death.calls else {}),
    }
    assert evidence.error_code(deployment, thread) == "node_failed"
    assert evidence.commands(deployment, thread)["undo"] == 3
    assert evidence.history(deployment, thread) == [("input", {}), ("step", {"board": 1})]
    assert deployment.query(
        "SELECT status, undoing, lease_nonce FROM keepstep_thread WHERE name = :name", name=thread
    ) == [("failed", 2, None)]
    eventually(lambda: [e for e in worker.events("child_lost") if e["pid"] == pid], what="the loss noticed")


def resolve(crew, thread, death):
    """Say of the undo under which the process died what the outside world has counted of it."""
    deployment = crew.deployment
    assert evidence.error_code(deployment, thread) == "effect_unknown"
    name = death.at.removeprefix("charge:").removesuffix("/undo")
    times = death.calls.get(f"refund-{name}", 1)
    assert crew.outside.calls(thread).get(f"refund-{name}", 0) == times
    [(key,)] = deployment.query(
        "SELECT e.step || '/' || e.run || '/' || e.call FROM keepstep_effect e JOIN keepstep_thread t "
        "ON t.id = e.thread_id WHERE t.name = :name AND e.state = 'intent'",
        name=thread,
    )
    deployment.client.resolve(key, "happened" if times else "not_happened", by="anna")
