"""Workers are killed while they fire a schedule: its tick has one run, and the next tick comes in its time."""

from __future__ import annotations

import signal

import pytest

from tests.crash import evidence
from tests.crash.matrix import OF_SCHEDULES
from tests.worker.deployment import eventually

pytestmark = pytest.mark.kill


@pytest.mark.parametrize("death", OF_SCHEDULES, ids=lambda death: death.id)
def test_a_main_process_dies_while_it_fires_a_schedule(crew, death):
    workers, name = crew.workers(2), f"row-{death.point}"
    deployment = crew.deployment
    deployment.client.schedule(name, "fleet", "0 0 1 1 *", {"seats": 0, "seat": 0}, thread=name)
    [(then,)] = deployment.query("SELECT next_at FROM keepstep_schedule WHERE name = :name", name=name)
    crew.arm(death.point, name)

    deployment.execute("UPDATE keepstep_schedule SET next_at = 0, due_at = 0 WHERE name = :name", name=name)
    point, pid = crew.died()

    assert point == death.point
    deployment.ended(name)
    assert evidence.count(deployment, "run", name) == 1
    assert evidence.count(deployment, "run", name, "x.status = 'done'") == 1
    assert evidence.commands(deployment, name) == {"start": 1}
    # Of years of ticks the last one.
    [(next_at, run_id, error)] = deployment.query(
        "SELECT next_at, run_id, error FROM keepstep_schedule WHERE name = :name", name=name
    )
    assert (next_at, error) == (then, None)
    assert deployment.query("SELECT id FROM keepstep_run WHERE id = :id", id=run_id) == [(run_id,)]
    [victim] = [worker for worker in workers if worker.pid == pid]
    assert eventually(lambda: victim.process.poll() is not None, what="the death")
    assert victim.process.returncode == -signal.SIGKILL
